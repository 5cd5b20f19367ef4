// Libraries of products, solvers and collectives: what has to answer, or takes time on a stream. All their other
// functions, as torch asks for them, do nothing; their list is made from torch's own libraries (see build.py).
//
// Declared as far as they are used: a library's first argument is its handle, of our own making.
#include <cstdlib>
#include <cstring>

#include "fake.h"

using namespace fake;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
};

constexpr int SUCCESS = 0;
constexpr int CUBLAS_VERSION = 130'100;
constexpr int NCCL_VERSION = 22'809;
constexpr size_t DESCRIPTION_BYTES = 256;
constexpr size_t HEURISTIC_BYTES = 96;  // of a cublasLtMatmulHeuristicResult_t
constexpr int NCCL_ID_BYTES = 128;

int make_handle(void** handle) {
  *handle = new Handle;
  return SUCCESS;
}

int make_description(void** description) {
  *description = std::calloc(1, DESCRIPTION_BYTES);
  return SUCCESS;
}

int multiply(const Handle* handle) {
  enqueue_kernel(handle->stream, product_seconds());
  return SUCCESS;
}

}  // namespace

extern "C" {

// ---- cuBLAS

int cublasCreate_v2(void** handle) { return make_handle(handle); }
int cublasLtCreate(void** handle) { return make_handle(handle); }

int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return SUCCESS;
}

int cublasGemmEx(Handle* handle, ...) { return multiply(handle); }
int cublasGemmStridedBatchedEx(Handle* handle, ...) { return multiply(handle); }
int cublasSgemm_v2(Handle* handle, ...) { return multiply(handle); }
int cublasSgemmStridedBatched(Handle* handle, ...) { return multiply(handle); }
int cublasDgemm_v2(Handle* handle, ...) { return multiply(handle); }
int cublasDgemmStridedBatched(Handle* handle, ...) { return multiply(handle); }

int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return SUCCESS;
}

int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return SUCCESS;
}

int cublasGetVersion_v2(void*, int* version) {
  *version = CUBLAS_VERSION;
  return SUCCESS;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasGetStatusString(int) { return "a status of the stand-in"; }

// ---- cuBLASLt

int cublasLtMatmulDescCreate(void** description, int, int) { return make_description(description); }
int cublasLtMatrixLayoutCreate(void** description, int, long, long, long) { return make_description(description); }
int cublasLtMatmulPreferenceCreate(void** description) { return make_description(description); }

int cublasLtMatmulDescDestroy(void* description) {
  std::free(description);
  return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void* description) {
  std::free(description);
  return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void* description) {
  std::free(description);
  return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  std::memset(results, 0, HEURISTIC_BYTES);
  *count = 1;
  return SUCCESS;
}

int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                   size_t, cudaStream_t stream) {
  enqueue_kernel(stream, product_seconds());
  return SUCCESS;
}

// ---- NCCL, of one rank

int ncclGetVersion(int* version) {
  *version = NCCL_VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(char* id) {
  std::memset(id, 1, NCCL_ID_BYTES);
  return SUCCESS;
}

int ncclCommInitRank(void** communicator, ...) { return make_handle(communicator); }
int ncclCommInitRankConfig(void** communicator, ...) { return make_handle(communicator); }
int ncclCommInitRankScalable(void** communicator, ...) { return make_handle(communicator); }
int ncclCommSplit(void*, int, int, void** communicator, void*) { return make_handle(communicator); }

int ncclCommCount(void*, int* ranks) {
  *ranks = 1;
  return SUCCESS;
}

int ncclCommUserRank(void*, int* rank) {
  *rank = 0;
  return SUCCESS;
}

int ncclCommGetAsyncError(void*, int* error) {
  *error = SUCCESS;
  return SUCCESS;
}

const char* ncclGetErrorString(int) { return "an error of the stand-in"; }
const char* ncclGetLastError(void*) { return ""; }

}  // extern "C"
