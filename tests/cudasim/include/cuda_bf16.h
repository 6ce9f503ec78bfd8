// The types are in cuda.hpp.
