// Memory of the devices, pinned memory of the host, and copies. The memory of a device is the host's address space,
// reserved and never written where no bytes are to move: a step of 60 GiB takes none of it.
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "fake.h"

namespace fake {

namespace {

constexpr double GIB = 1 << 30;
constexpr double COPY_LATENCY = 8e-6;
constexpr double DEVICE_BANDWIDTH = 1e12;
// No copy moves anything large, and none takes time.
bool without_bytes() {
  static const bool value = setting("FAKE_CUDA_NO_BYTES", 0) != 0;
  return value;
}

double bytes_per_second() {
  static const double value = setting("FAKE_CUDA_GBPS", 50) * 1e9;
  return value;
}

size_t capacity() {
  static const auto value = static_cast<size_t>(setting("FAKE_CUDA_DEVICE_GIB", 80) * GIB);
  return value;
}

void take_the_time_to_pin(size_t nbytes) {
  static const double seconds_per_gib = setting("FAKE_CUDA_PIN_S_PER_GIB", 0.3);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds_per_gib * nbytes / GIB));
}

size_t pinned_bytes() {
  size_t nbytes = 0;
  for (const auto& range : world().pinned_memory) {
    nbytes += range.second.nbytes;
  }
  return nbytes;
}

// As on a system that limits it; asked for each time, so that a test can set the limit.
bool may_pin(size_t nbytes) {
  return pinned_bytes() + nbytes <= setting("FAKE_CUDA_PINNED_GIB", NEVER) * GIB;
}

void* reserve(size_t nbytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* address = mmap(nullptr, nbytes == 0 ? 1 : nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

// The range that an address lies in.
const Ranges::value_type* range_of(const Ranges& ranges, const void* address) {
  auto* byte = static_cast<char*>(const_cast<void*>(address));
  auto behind = ranges.upper_bound(byte);
  if (behind == ranges.begin()) {
    return nullptr;
  }
  --behind;
  return byte < behind->first + behind->second.nbytes ? &*behind : nullptr;
}

bool overlaps(const Ranges& ranges, char* address, size_t nbytes) {
  auto behind = ranges.lower_bound(address + nbytes);
  if (behind == ranges.begin()) {
    return false;
  }
  --behind;
  return address < behind->first + behind->second.nbytes;
}

Engine engine_of(const void* target, const void* source, size_t nbytes, cudaMemcpyKind kind) {
  const bool to_device = lies_in(world().device_memory, target, nbytes);
  const bool from_device = lies_in(world().device_memory, source, nbytes);
  if (kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && from_device && !to_device)) {
    if (!from_device) {
      complain("what is copied out is not memory of the device: used after it was freed?");
    }
    return COPY_OUT;
  }
  if (kind == cudaMemcpyHostToDevice || (kind == cudaMemcpyDefault && to_device && !from_device)) {
    if (!to_device) {
      complain("what is copied in goes to no memory of the device: used after it was freed?");
    }
    return COPY_IN;
  }
  return COMPUTE;
}

double seconds_of(Engine engine, size_t nbytes) {
  if (without_bytes()) {
    return 0;
  }
  return COPY_LATENCY + nbytes / (engine == COMPUTE ? DEVICE_BANDWIDTH : bytes_per_second());
}

bool moves_bytes(size_t nbytes) {
  return !without_bytes() || nbytes <= SMALL;
}

}  // namespace

bool lies_in(const Ranges& ranges, const void* address, size_t nbytes) {
  const Ranges::value_type* range = range_of(ranges, address);
  const auto* byte = static_cast<const char*>(address);
  return range != nullptr && byte + nbytes <= range->first + range->second.nbytes;
}

}  // namespace fake

using namespace fake;

extern "C" {

// ---- memory of a device

cudaError_t cudaMalloc(void** address, size_t nbytes) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  *address = nullptr;
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  size_t& used = world().devices[current_device()].used_bytes;
  if (nbytes > capacity() - used) {
    return answer(cudaErrorMemoryAllocation);
  }
  *address = reserve(nbytes);
  if (*address == nullptr) {
    return answer(cudaErrorMemoryAllocation);
  }
  used += nbytes;
  world().device_memory[static_cast<char*>(*address)] = {nbytes, current_device()};
  return cudaSuccess;
}

// The host's wait: freeing memory of a device waits for all that the device has (CUDA Runtime API, "API synchronization
// behavior"; cudaFree).
cudaError_t cudaFree(void* address) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  if (address == nullptr) {
    return cudaSuccess;
  }
  auto found = world().device_memory.find(static_cast<char*>(address));
  if (found == world().device_memory.end()) {
    return answer(cudaErrorInvalidValue);
  }
  const Range range = found->second;
  wait_until(locked, [&] { return device_is_idle(range.device); });
  world().devices[range.device].used_bytes -= range.nbytes;
  world().device_memory.erase(static_cast<char*>(address));
  munmap(address, range.nbytes);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** address, size_t, cudaStream_t) {
  *address = nullptr;
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaFreeAsync(void*, cudaStream_t) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Locked locked(world().lock);
  *total_bytes = capacity();
  *free_bytes = capacity() - world().devices[current_device()].used_bytes;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Locked locked(world().lock);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  attributes->hostPointer = const_cast<void*>(address);
  if (const auto* range = range_of(world().device_memory, address)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = range->second.device;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = nullptr;
  } else if (range_of(world().pinned_memory, address) != nullptr) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device();
    attributes->devicePointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}

// ---- pinned memory of the host

cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  *address = may_pin(nbytes) ? reserve(nbytes) : nullptr;
  if (*address == nullptr) {
    return answer(cudaErrorMemoryAllocation);
  }
  world().pinned_memory[static_cast<char*>(*address)] = {nbytes, -1};
  locked.unlock();
  take_the_time_to_pin(nbytes);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  Locked locked(world().lock);
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  auto found = world().pinned_memory.find(static_cast<char*>(address));
  if (found == world().pinned_memory.end()) {
    return answer(cudaErrorInvalidValue);
  }
  munmap(address, found->second.nbytes);
  world().pinned_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  if (overlaps(world().pinned_memory, static_cast<char*>(address), nbytes)) {
    return answer(cudaErrorHostMemoryAlreadyRegistered);
  }
  if (!may_pin(nbytes)) {
    return answer(cudaErrorMemoryAllocation);
  }
  world().pinned_memory[static_cast<char*>(address)] = {nbytes, -1};
  locked.unlock();
  take_the_time_to_pin(nbytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  Locked locked(world().lock);
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  if (world().pinned_memory.erase(static_cast<char*>(address)) == 0) {
    return answer(cudaErrorHostMemoryNotRegistered);
  }
  return cudaSuccess;
}

long fake_cuda_pinned_bytes() {
  Locked locked(world().lock);
  return static_cast<long>(pinned_bytes());
}

// ---- copies

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind kind, cudaStream_t on) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  Stream* stream = stream_of(on);
  Operation copy;
  copy.engine = engine_of(target, source, nbytes, kind);
  copy.seconds = seconds_of(copy.engine, nbytes);
  if (moves_bytes(nbytes)) {
    copy.effect = [=] { std::memmove(target, source, nbytes); };
  }
  bool is_pageable = false;
  if (copy.engine == COPY_OUT) {
    world().counts["bytes out"] += nbytes;
    is_pageable = !lies_in(world().pinned_memory, target, nbytes);
  } else if (copy.engine == COPY_IN) {
    world().counts["bytes back"] += nbytes;
    is_pageable = !lies_in(world().pinned_memory, source, nbytes);
  }
  if (!is_pageable) {
    return answer(enqueue(locked, stream, std::move(copy)));
  }
  // The host's wait: a copy from or to memory that is not pinned goes through the driver's own buffer, and has been
  // made when the call returns (CUDA Runtime API, "API synchronization behavior": for transfers from device memory to
  // pageable host memory the function returns only once the copy has completed; the other way it may be synchronous).
  world().counts["pageable copies"] += 1;
  if (stream->capture != nullptr) {
    invalidate(*stream->capture, "a copy of memory that is not pinned");
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if (cudaError_t error = enqueue(locked, stream, std::move(copy))) {
    return answer(error);
  }
  wait_until(locked, [stream] { return stream->queue.empty(); });
  return cudaSuccess;
}

// On the default stream, and the host waits.
cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind kind) {
  {
    Locked locked(world().lock);
    if (cudaError_t error = refuse_unsafe(__func__)) {
      return answer(error);
    }
  }
  if (cudaError_t error = cudaMemcpyAsync(target, source, nbytes, kind, nullptr)) {
    return error;
  }
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t on) {
  return cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDeviceToDevice, on);
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t on) {
  for (size_t row = 0; row < height; ++row) {
    char* to = static_cast<char*>(target) + row * target_pitch;
    const char* from = static_cast<const char*>(source) + row * source_pitch;
    if (cudaError_t error = cudaMemcpyAsync(to, from, width, kind, on)) {
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t nbytes, cudaStream_t on) {
  Locked locked(world().lock);
  Operation set;
  set.engine = COMPUTE;
  set.seconds = seconds_of(COMPUTE, nbytes);
  if (nbytes <= SMALL) {
    set.effect = [=] { std::memset(address, value, nbytes); };
  }
  return answer(enqueue(locked, stream_of(on), std::move(set)));
}

cudaError_t cudaMemset(void* address, int value, size_t nbytes) {
  return cudaMemsetAsync(address, value, nbytes, nullptr);
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}

// ---- the driver's own pools, and memory of other processes: there are none

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(1);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void*) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return answer(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return answer(cudaErrorNotSupported);
}

}  // extern "C"
