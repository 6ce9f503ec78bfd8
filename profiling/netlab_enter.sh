#!/bin/sh
# What ssh is to mpiexec: netlab_enter.sh [-options] HOST COMMAND... runs the command on a host of netlab.py,
# with a name and shared memory of that host alone.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$NETLAB_PREFIX$host" unshare --uts sh -c '
  hostname "$0" && mount -t tmpfs tmpfs /dev/shm && eval "$*"' "$host" "$@"
