// What a device says of itself (an H100), errors, and kernels, which take time. Two kinds do what they are for, since
// the host acts on it: torch.cuda._sleep, and fills (a learning rate on the device, a counter). No other computes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fake.h"

namespace fake {

namespace {

constexpr int CLOCK_KHZ = 1'980'000;
constexpr int MEMORY_CLOCK_KHZ = 2'619'000;
constexpr int MEMORY_BUS_BITS = 5120;
constexpr int PROCESSORS = 132;
constexpr int WARP = 32;
constexpr int THREADS_OF_BLOCK = 1024;
constexpr int THREADS_OF_PROCESSOR = 2048;
constexpr int REGISTERS = 65536;
constexpr int SHARED_BYTES = 49152;
constexpr int SHARED_BYTES_OPTIN = 232448;
constexpr int SHARED_BYTES_OF_PROCESSOR = 233472;

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

struct LaunchConfiguration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local LaunchConfiguration pushed;

struct Known {
  bool sleeps = false;       // for as many cycles as its argument says
  size_t filled_bytes = 0;   // of each element; 0 where it fills nothing
};

std::map<const void*, Known>& known_kernels() {
  static auto& one = *new std::map<const void*, Known>;
  return one;
}

// How large an element is that a kernel of this mangled name fills contiguous memory with; 0 for other kernels.
size_t filled_bytes(const std::string& name) {
  static const std::string functor = "FillFunctorI";
  static const std::pair<const char*, size_t> types[] = {
      {"b", 1}, {"h", 1}, {"a", 1}, {"s", 2}, {"i", 4}, {"f", 4}, {"l", 8}, {"d", 8},
      {"N3c108BFloat16E", 2}, {"N3c104HalfE", 2},
  };
  const size_t found = name.find(functor);
  if (found == std::string::npos || name.find("vectorized_elementwise_kernel") == std::string::npos) {
    return 0;
  }
  for (const auto& [type, nbytes] : types) {
    if (name.compare(found + functor.size(), std::strlen(type), type) == 0) {
      return nbytes;
    }
  }
  return 0;
}

// Arguments of a fill: how many elements, the value, and where. What the host acts on is small; a compiler that times
// its kernels fills hundreds of MiB again and again.
std::function<void()> fill(void** arguments, size_t element) {
  const auto count = static_cast<size_t>(*static_cast<int*>(arguments[0]));
  const auto* value = static_cast<const char*>(arguments[1]);
  char* target = *static_cast<char**>(arguments[2]);
  if (count * element > SMALL) {
    return nullptr;
  }
  return [target, count, pattern = std::string(value, element)] {
    for (size_t index = 0; index < count; ++index) {
      std::memcpy(target + index * pattern.size(), pattern.data(), pattern.size());
    }
  };
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t on) {
  auto found = known_kernels().find(function);
  const Known known = found == known_kernels().end() ? Known{} : found->second;
  double seconds = kernel_seconds();
  if (known.sleeps && seconds > 0) {
    seconds = *static_cast<int64_t*>(arguments[0]) / (CLOCK_KHZ * 1e3);
  }
  return enqueue_kernel(on, seconds, known.filled_bytes == 0 ? nullptr : fill(arguments, known.filled_bytes));
}

}  // namespace

double setting(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atof(text);
}

double kernel_seconds() {
  static const double value = setting("FAKE_CUDA_KERNEL_US", 20) * 1e-6;
  return value;
}

double product_seconds() {
  static const double value = setting("FAKE_CUDA_GEMM_US", 100) * 1e-6;
  return value;
}

int current_device() {
  return device_of_thread;
}

int device_count() {
  static const int value = std::min(static_cast<int>(setting("FAKE_CUDA_DEVICES", 1)), MOST_DEVICES);
  return value;
}

void complain(const std::string& what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
}

void mention(const std::string& what) {
  static const bool is_verbose = setting("FAKE_CUDA_VERBOSE", 0) != 0;
  if (is_verbose) {
    complain(what);
  }
}

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) {
    last_error = error;
  }
  return error;
}

cudaError_t enqueue_kernel(cudaStream_t on, double seconds, std::function<void()> effect) {
  Locked locked(world().lock);
  world().counts["kernels"] += 1;
  Operation kernel;
  kernel.engine = COMPUTE;
  kernel.seconds = seconds;
  kernel.effect = std::move(effect);
  return answer(enqueue(locked, stream_of(on), std::move(kernel)));
}

}  // namespace fake

using namespace fake;

extern "C" {

// ---- kernels, as nvcc registers them and calls them

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const bool sleeps = std::strstr(name, "spin_kernel") != nullptr;
  const size_t nbytes = filled_bytes(name);
  if (sleeps || nbytes > 0) {
    known_kernels()[function] = {sleeps, nbytes};
  }
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

char __cudaInitModule(void**) {
  return 1;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t on) {
  return launch(kernel, arguments, on);
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t on) {
  return launch(function, arguments, on);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return launch(function, arguments, configuration->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t on) {
  return launch(function, arguments, on);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = THREADS_OF_BLOCK;
  attributes->numRegs = 32;
  attributes->ptxVersion = 90;
  attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = SHARED_BYTES_OPTIN;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) {
    return answer(cudaErrorInvalidDevice);
  }
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "NVIDIA H100 80GB HBM3 (fake)");
  size_t free_bytes = 0;
  cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = PROCESSORS;
  properties->warpSize = WARP;
  properties->maxThreadsPerBlock = THREADS_OF_BLOCK;
  properties->maxThreadsPerMultiProcessor = THREADS_OF_PROCESSOR;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->regsPerBlock = REGISTERS;
  properties->regsPerMultiprocessor = REGISTERS;
  properties->sharedMemPerBlock = SHARED_BYTES;
  properties->sharedMemPerBlockOptin = SHARED_BYTES_OPTIN;
  properties->sharedMemPerMultiprocessor = SHARED_BYTES_OF_PROCESSOR;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = MEMORY_BUS_BITS;
  properties->pciBusID = 3 + device;
  properties->asyncEngineCount = 2;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->canMapHostMemory = 1;
  properties->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = THREADS_OF_BLOCK; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_OF_PROCESSOR; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = REGISTERS; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = REGISTERS; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_BYTES_OPTIN; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_BYTES_OF_PROCESSOR; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrClockRate: *value = CLOCK_KHZ; break;
    case cudaDevAttrMemoryClockRate: *value = MEMORY_CLOCK_KHZ; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = MEMORY_BUS_BITS; break;
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    case cudaDevAttrHostNativeAtomicSupported: *value = 0; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", 3 + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

// What torch asks the driver for in this way (memory that is mapped by pages, and the like) is not there.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  mention(std::string("no ") + name + " in the driver");
  *function = nullptr;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// ---- errors

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from another thread";
    default: return "an error that the stand-in has no words for";
  }
}

const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[32];
  std::snprintf(name, sizeof name, "cudaError %d", static_cast<int>(error));
  return name;
}

}  // extern "C"
