// Events: points in streams that other streams, and the host, wait for.
#include <algorithm>

#include "fake.h"

namespace fake {

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

namespace {

bool is_reached(const Event& event) {
  return event.record == nullptr || event.record->is_done;
}

}  // namespace

}  // namespace fake

using namespace fake;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->is_timed = (flags & cudaEventDisableTiming) == 0;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

// CUDA Runtime API, cudaEventDestroy: it may be called before the event is reached, and who waits for it still does.
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Locked locked(world().lock);
  delete &event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  Locked locked(world().lock);
  world().counts["cudaEventRecord"] += 1;
  Event& event = event_of(handle);
  Stream* stream = stream_of(on);
  // CUDA Programming Guide, "Stream capture", "Cross-stream dependencies and events": recorded in a capture, an event
  // stands for the nodes that the stream has captured last, and for nothing that runs.
  if (Capture* capture = stream->capture) {
    if (capture->is_invalid) {
      return answer(cudaErrorStreamCaptureInvalidated);
    }
    event.captured_by = capture->id;
    event.behind = stream->behind;
    return cudaSuccess;
  }
  event.captured_by = 0;
  event.record = std::make_shared<Record>();
  Operation operation;
  operation.kind = Kind::RECORD;
  operation.record = event.record;
  return answer(enqueue(locked, stream, std::move(operation)));
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  return cudaEventRecordWithFlags(handle, on, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  const Event& event = event_of(handle);
  if (cudaError_t error = refuse_captured(event, __func__)) {
    return answer(error);
  }
  advance(locked);
  return answer(is_reached(event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  const Event event = event_of(handle);  // as it is now: another thread may record it anew meanwhile
  if (cudaError_t error = refuse_captured(event, __func__)) {
    return answer(error);
  }
  wait_until(locked, [&event] { return is_reached(event); });
  return cudaSuccess;
}

// CUDA Runtime API, cudaEventElapsedTime: both were made with timing and are complete.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Locked locked(world().lock);
  advance(locked);
  const Event& first = event_of(from);
  const Event& last = event_of(to);
  for (const Event* event : {&first, &last}) {
    if (!event->is_timed || event->captured_by != 0 || event->record == nullptr) {
      return answer(cudaErrorInvalidResourceHandle);
    }
    if (!event->record->is_done) {
      return answer(cudaErrorNotReady);
    }
  }
  *milliseconds = static_cast<float>((last.record->time - first.record->time) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t for_what, unsigned) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  Stream* stream = stream_of(handle);
  const Event& event = event_of(for_what);
  if (stream->capture != nullptr && stream->capture->is_invalid) {
    return answer(cudaErrorStreamCaptureInvalidated);
  }
  if (Capture* capture = capture_of(event)) {
    if (capture->is_invalid) {
      return answer(cudaErrorStreamCaptureInvalidated);
    }
    // CUDA Runtime API, cudaErrorStreamCaptureMerge: one capture cannot come to depend on another.
    if (stream->capture != nullptr && stream->capture != capture) {
      invalidate(*capture, "a wait by another capture");
      invalidate(*stream->capture, "a wait for another capture");
      return answer(cudaErrorStreamCaptureMerge);
    }
    // CUDA Programming Guide, "Cross-stream dependencies and events": whoever waits for an event of a capture is
    // captured from here on, by the same one.
    if (stream->capture == nullptr) {
      if (stream->is_default) {
        complain("the default stream joins a capture");
      }
      stream->capture = capture;
      stream->behind.clear();
      capture->streams.insert(stream);
    }
    for (const auto& [other, count] : event.behind) {
      long& reached = stream->behind[other];
      reached = std::max(reached, count);
    }
    return cudaSuccess;
  }
  if (event.captured_by != 0) {
    complain("a wait for an event of a capture that has ended");
    return answer(cudaErrorCapturedEvent);
  }
  if (stream->capture != nullptr) {
    if (event.record == nullptr) {
      return cudaSuccess;  // never recorded: there is nothing to wait for
    }
    // CUDA Runtime API, cudaErrorStreamCaptureIsolation: a captured stream depends on nothing outside of its capture,
    // even where that is done.
    invalidate(*stream->capture, "a wait for an event from outside of the capture");
    return answer(cudaErrorStreamCaptureIsolation);
  }
  if (is_reached(event)) {
    return cudaSuccess;
  }
  Operation operation;
  operation.kind = Kind::WAIT;
  operation.record = event.record;
  return answer(enqueue(locked, stream, std::move(operation)));
}

}  // extern "C"
