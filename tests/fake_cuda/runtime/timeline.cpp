// Streams and time. No thread stands for the device: whoever calls lets everything happen that is due by now, in the
// order of time, and a host that waits sleeps until the next thing is due.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "fake.h"

namespace fake {

World& world() {
  static World& one = *[] {
    auto* made = new World;
    for (int device = 0; device < MOST_DEVICES; ++device) {
      Stream& stream = made->devices[device].default_stream;
      stream.device = device;
      stream.is_default = true;
      made->streams.push_back(&stream);
    }
    return made;
  }();
  return one;
}

double now() {
  using Clock = std::chrono::steady_clock;
  static const Clock::time_point began = Clock::now();
  return std::chrono::duration<double>(Clock::now() - began).count();
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return &world().devices[current_device()].default_stream;
  }
  return reinterpret_cast<Stream*>(handle);
}

namespace {

struct Due {
  double time = NEVER;
  double ready = NEVER;  // since when it could have started, were the engine free: engines serve who came first
  Stream* stream = nullptr;

  bool operator<(const Due& other) const {
    return time != other.time ? time < other.time : ready < other.ready;
  }
};

// When the next thing happens in `stream`: its first operation starts, or ends.
Due next_in(Stream* stream) {
  if (stream->queue.empty()) {
    return {};
  }
  const Operation& first = stream->queue.front();
  if (first.has_started) {
    return {first.end, first.end, stream};
  }
  double ready = std::max(stream->free_at, first.enqueued);
  if (first.kind == Kind::WAIT) {
    if (!first.record->is_done) {
      return {};  // it is the other stream's turn
    }
    return {std::max(ready, first.record->time), ready, stream};
  }
  double start = ready;
  if (first.engine != NO_ENGINE) {
    start = std::max(start, world().devices[stream->device].engine_free_at[first.engine]);
  }
  return {start, ready, stream};
}

Due next() {
  Due found;
  for (Stream* stream : world().streams) {
    found = std::min(found, next_in(stream));
  }
  return found;
}

// Starts the first operation of a stream, or ends it.
void happen(const Due& due) {
  Stream& stream = *due.stream;
  Operation& first = stream.queue.front();
  if (!first.has_started && first.kind == Kind::WORK) {
    first.has_started = true;
    first.end = due.time + first.seconds;
    if (first.engine != NO_ENGINE) {
      Device& device = world().devices[stream.device];
      device.engine_free_at[first.engine] = first.end;
      device.busy_seconds[first.engine] += first.seconds;
    }
    return;
  }
  if (first.kind == Kind::RECORD) {
    first.record->is_done = true;
    first.record->time = due.time;
  }
  if (first.effect) {
    first.effect();
  }
  stream.free_at = due.time;
  stream.queue.pop_front();
}

}  // namespace

void advance(Locked&) {
  const double until = now();
  for (Due due = next(); due.time <= until; due = next()) {
    happen(due);
  }
}

void wait_until(Locked& locked, const std::function<bool()>& is_done) {
  for (advance(locked); !is_done(); advance(locked)) {
    const double time = next().time;
    if (time == NEVER) {
      complain("the host waits for what never comes");
      std::abort();
    }
    world().counts["host waits"] += 1;
    locked.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double>(time - now()));
    locked.lock();
  }
}

bool device_is_idle(int device) {
  const auto& streams = world().streams;
  return std::all_of(streams.begin(), streams.end(), [device](const Stream* stream) {
    return stream->device != device || stream->queue.empty();
  });
}

cudaError_t enqueue(Locked& locked, Stream* stream, Operation operation) {
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalid) {
      return cudaErrorStreamCaptureInvalidated;
    }
    stream->capture->graph->nodes.push_back(std::move(operation));
    stream->behind[stream] += 1;
    return cudaSuccess;
  }
  operation.enqueued = now();
  stream->queue.push_back(std::move(operation));
  advance(locked);
  return cudaSuccess;
}

}  // namespace fake

using namespace fake;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  if ((flags & cudaStreamNonBlocking) == 0) {
    complain("a stream is made that synchronizes with the default one, which is not modelled");
  }
  auto* stream = new Stream;
  stream->device = current_device();
  stream->priority = priority;
  Locked locked(world().lock);
  world().streams.push_back(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamNonBlocking, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;  // what it still has runs; there are few
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_waiting(stream, __func__)) {
    return answer(error);
  }
  advance(locked);
  return answer(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_waiting(stream, __func__)) {
    return answer(error);
  }
  wait_until(locked, [stream] { return stream->queue.empty(); });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  // "Stream capture", CUDA Programming Guide, "Prohibited and unhandled operations": a capture's work is not in the
  // device yet, so nobody can wait for a device that has a stream in a capture, whatever its mode is.
  for (auto& [id, capture] : world().captures) {
    invalidate(*capture, __func__);
  }
  if (!world().captures.empty()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  wait_until(locked, [] { return device_is_idle(current_device()); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  Locked locked(world().lock);
  Operation operation;
  operation.effect = [function, argument] { function(argument); };
  return answer(enqueue(locked, stream_of(handle), std::move(operation)));
}

cudaError_t cudaStreamAddCallback(cudaStream_t, cudaStreamCallback_t, void*, unsigned) {
  return answer(cudaErrorNotSupported);
}

// ---- for tests

long fake_cuda_count(const char* name) {
  Locked locked(world().lock);
  auto found = world().counts.find(name);
  return found == world().counts.end() ? 0 : found->second;
}

double fake_cuda_busy_seconds(int engine) {
  Locked locked(world().lock);
  advance(locked);
  double seconds = 0;
  for (const Device& device : world().devices) {
    seconds += device.busy_seconds[engine];
  }
  return seconds;
}

void fake_cuda_forget() {
  Locked locked(world().lock);
  advance(locked);
  world().counts.clear();
  for (Device& device : world().devices) {
    std::fill(device.busy_seconds, device.busy_seconds + ENGINES, 0.0);
  }
}

}  // extern "C"
