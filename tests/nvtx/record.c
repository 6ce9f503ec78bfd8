/* What a profiler would see of NVTX: writes it to the file named by NVTX_RECORD, a line for each call.

   Built against NVIDIA's headers, loaded by NVTX where NVTX_INJECTION64_PATH names it. */
#include <inttypes.h>
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static FILE *out;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Handles of domains and strings are what they are called. */
static nvtxDomainHandle_t create_domain(const char *name) { return (nvtxDomainHandle_t)strdup(name); }

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
  (void)domain;
  return (nvtxStringHandle_t)strdup(text);
}

static void name_category(nvtxDomainHandle_t domain, uint32_t id, const char *name) {
  fprintf(out, "category\t%s\t%" PRIu32 "\t%s\n", (char *)domain, id, name);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
  int registered = a->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  const char *text = registered ? (const char *)a->message.registered : a->message.ascii;
  fprintf(out, "push\t%s\t%" PRIu32 "\t%s\t", (char *)domain, a->category, text);
  if (a->payloadType == NVTX_PAYLOAD_TYPE_INT64) fprintf(out, "%" PRId64, a->payload.llValue);
  fprintf(out, "\t%s\t%" PRId64 "\n", registered ? "registered" : "inline", now());
  return 0;
}

static int pop(nvtxDomainHandle_t domain) {
  fprintf(out, "pop\t%s\t%" PRId64 "\n", (char *)domain, now());
  return 0;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const NvtxExportTableCallbacks *callbacks = export_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table;
  unsigned int size;
  const char *path = getenv("NVTX_RECORD");
  if (!path || !(out = fopen(path, "w"))) return 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
  *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
  *table[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
