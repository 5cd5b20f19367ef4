// Captures, what they forbid, and the graphs that they end in. The rules are those of the CUDA Programming Guide
// ("CUDA Graphs", "Creating a graph using stream capture") and of the CUDA Runtime API ("Stream Management").
#include <cstdio>
#include <utility>

#include "fake.h"

namespace fake {

namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool is_of_this_thread(const Capture& capture) {
  return pthread_equal(capture.thread, pthread_self()) != 0;
}

// CUDA Runtime API, cudaThreadExchangeStreamCaptureMode: which calls of a thread that may wait or allocate are refused.
//   global        while the thread has a capture that is not relaxed, or any thread has a global one
//   thread local  while the thread has a capture that is not relaxed
//   relaxed       never
bool forbids(const Capture& capture) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  if (is_of_this_thread(capture) && capture.mode != cudaStreamCaptureModeRelaxed) {
    return true;
  }
  return mode_of_thread == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

}  // namespace

// "Invalidation": after an operation that a capture forbids its streams refuse everything, and it ends without a graph.
void invalidate(Capture& capture, const char* why) {
  if (!capture.is_invalid) {
    capture.is_invalid = true;
    mention("a capture is invalidated by " + std::string(why));
  }
}

// The capture under way in which `event` was last recorded.
Capture* capture_of(const Event& event) {
  auto found = world().captures.find(event.captured_by);
  return found == world().captures.end() ? nullptr : found->second;
}

// For a call that is "potentially unsafe" by CUDA Runtime API, cudaThreadExchangeStreamCaptureMode: one that may make the
// host wait, as memory does that is allocated, freed, pinned or released.
cudaError_t refuse_unsafe(const char* call) {
  cudaError_t error = cudaSuccess;
  for (auto& [id, capture] : world().captures) {
    if (forbids(*capture)) {
      invalidate(*capture, call);
      error = cudaErrorStreamCaptureUnsupported;
    }
  }
  return error;
}

// The host's wait: "it is invalid to synchronize or query the execution status of a stream which is being captured"
// (CUDA Programming Guide, "Prohibited and unhandled operations"); for another stream it is an unsafe call.
cudaError_t refuse_waiting(Stream* stream, const char* call) {
  if (stream->capture != nullptr) {
    invalidate(*stream->capture, call);
    return cudaErrorStreamCaptureUnsupported;
  }
  return refuse_unsafe(call);
}

// The same of an event: one "last recorded in a capturing stream" (CUDA Runtime API, cudaErrorCapturedEvent) stands for
// nothing that runs, also when its capture has ended.
cudaError_t refuse_captured(const Event& event, const char* call) {
  if (event.captured_by != 0) {
    if (Capture* capture = capture_of(event)) {
      invalidate(*capture, call);
    }
    return cudaErrorCapturedEvent;
  }
  return refuse_unsafe(call);
}

namespace {

// CUDA Runtime API, cudaStreamEndCapture: every stream that the capture has taken in was joined to its origin, which
// comes behind all that they have captured.
bool is_joined(const Capture& capture) {
  const Reached& joined = capture.origin->behind;
  for (Stream* stream : capture.streams) {
    auto has = stream->behind.find(stream);
    if (stream == capture.origin || has == stream->behind.end()) {
      continue;
    }
    auto reached = joined.find(stream);
    if (reached == joined.end() || reached->second < has->second) {
      return false;
    }
  }
  return true;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (stream.capture == nullptr) {
    return cudaStreamCaptureStatusNone;
  }
  return stream.capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace

}  // namespace fake

using namespace fake;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

// CUDA Runtime API, cudaStreamBeginCapture: of a stream that is not captured already, and never of the default one.
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Locked locked(world().lock);
  Stream* stream = stream_of(handle);
  if (stream->is_default) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if (stream->capture != nullptr) {
    return answer(cudaErrorIllegalState);
  }
  static uint64_t last_id = 0;
  auto* capture = new Capture{};
  capture->id = ++last_id;
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = stream;
  capture->streams.insert(stream);
  stream->capture = capture;
  stream->behind.clear();
  world().captures[capture->id] = capture;
  return cudaSuccess;
}

// CUDA Runtime API, cudaStreamEndCapture: on the stream and, unless the capture is relaxed, on the thread that began it.
// However it ends, it has ended.
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Locked locked(world().lock);
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  if (stream->capture == nullptr) {
    return answer(cudaErrorIllegalState);
  }
  if (stream->capture->origin != stream) {
    return answer(cudaErrorStreamCaptureUnmatched);
  }
  if (stream->capture->mode != cudaStreamCaptureModeRelaxed && !is_of_this_thread(*stream->capture)) {
    return answer(cudaErrorStreamCaptureWrongThread);
  }
  const std::unique_ptr<Capture> capture(stream->capture);
  cudaError_t error = cudaSuccess;
  if (capture->is_invalid) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (!is_joined(*capture)) {
    error = cudaErrorStreamCaptureUnjoined;
  } else {
    *graph = reinterpret_cast<cudaGraph_t>(capture->graph.release());
  }
  for (Stream* one : capture->streams) {
    one->capture = nullptr;
    one->behind.clear();
  }
  world().captures.erase(capture->id);
  return answer(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Locked locked(world().lock);
  *status = status_of(*stream_of(handle));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  Locked locked(world().lock);
  Stream* stream = stream_of(handle);
  *status = status_of(*stream);
  if (stream->capture != nullptr) {
    if (id != nullptr) {
      *id = stream->capture->id;
    }
    if (graph != nullptr) {
      *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph.get());
    }
  }
  if (dependencies != nullptr) {
    *dependencies = nullptr;
  }
  if (edges != nullptr) {
    *edges = nullptr;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}

// ---- graphs, whose nodes run one behind the other on the stream that they are launched on

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  Locked locked(world().lock);
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  Locked locked(world().lock);
  if (cudaError_t error = refuse_unsafe(__func__)) {
    return answer(error);
  }
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t on) {
  Locked locked(world().lock);
  world().counts[__func__] += 1;
  Stream* stream = stream_of(on);
  for (const Operation& node : reinterpret_cast<Graph*>(graph)->nodes) {
    if (cudaError_t error = enqueue(locked, stream, node)) {
      return answer(error);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned) {
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    return answer(cudaErrorOperatingSystem);
  }
  for (const Operation& node : reinterpret_cast<Graph*>(graph)->nodes) {
    const bool copies = node.engine == COPY_OUT || node.engine == COPY_IN;
    const char* way = node.engine == COPY_OUT ? "DtoH" : "HtoD";
    std::fprintf(file, "%s\n", copies ? (std::string("MEMCPY ") + way).c_str() : "KERNEL");
  }
  std::fclose(file);
  return cudaSuccess;
}

}  // extern "C"
