// What the parts of the stand-in share: devices with streams and engines, events, captures, and the lock over them all.
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int MOST_DEVICES = 8;

// A device computes with one engine and copies with one for each way; what is given to an engine runs in order.
enum Engine { COMPUTE, COPY_OUT, COPY_IN, ENGINES, NO_ENGINE = ENGINES };

struct Capture;
struct Stream;

// Points in streams, as how many operations of each have been captured.
using Reached = std::map<Stream*, long>;

// A point in a stream. It lives on where its event is recorded anew, or destroyed: who waits has waited for this one.
struct Record {
  bool is_done = false;
  double time = 0;
};

struct Event {
  bool is_timed = true;
  std::shared_ptr<Record> record;  // the newest; none before there is one
  // Where it was last recorded in a stream that was being captured: by which capture, and behind what.
  uint64_t captured_by = 0;
  Reached behind;
};

enum class Kind { WORK, RECORD, WAIT };

struct Operation {
  Kind kind = Kind::WORK;
  Engine engine = NO_ENGINE;
  double seconds = 0;
  std::function<void()> effect;  // happens when the operation ends
  std::shared_ptr<Record> record;
  double enqueued = 0;
  bool has_started = false;
  double end = 0;
};

struct Graph {
  std::vector<Operation> nodes;
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  Stream* origin;
  std::set<Stream*> streams;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  bool is_invalid = false;
};

struct Stream {
  int device = 0;
  int priority = 0;
  bool is_default = false;
  std::deque<Operation> queue;
  double free_at = 0;  // when all that has left the queue was done
  Capture* capture = nullptr;
  Reached behind;  // in a capture
};

struct Device {
  Stream default_stream;
  double engine_free_at[ENGINES] = {};
  double busy_seconds[ENGINES] = {};
  size_t used_bytes = 0;
};

struct Range {
  size_t nbytes;
  int device;
};

// Memory by where it begins.
using Ranges = std::map<char*, Range>;

struct World {
  std::mutex lock;
  Device devices[MOST_DEVICES];
  std::vector<Stream*> streams;
  std::map<uint64_t, Capture*> captures;  // that are under way
  Ranges device_memory;
  Ranges pinned_memory;
  std::map<std::string, long> counts;
};

using Locked = std::unique_lock<std::mutex>;

// The one world, which is never destroyed: threads may still call when the process ends.
World& world();

// A number from the environment, read once for each place that asks.
double setting(const char* name, double otherwise);

// Returns `error`, which cudaGetLastError tells until it is asked.
cudaError_t answer(cudaError_t error);

// Says on stderr what no correct program does; with FAKE_CUDA_VERBOSE what else may be of interest.
void complain(const std::string& what);
void mention(const std::string& what);

int current_device();
int device_count();

// ---- timeline.cpp

double now();
Stream* stream_of(cudaStream_t handle);

// Puts an operation behind what the stream has; into its capture, where it is being captured.
cudaError_t enqueue(Locked& locked, Stream* stream, Operation operation);

// Lets everything happen that is due.
void advance(Locked& locked);

// The host waits, without the lock, until `is_done`.
void wait_until(Locked& locked, const std::function<bool()>& is_done);
bool device_is_idle(int device);

// ---- captures.cpp

void invalidate(Capture& capture, const char* why);
Capture* capture_of(const Event& event);
cudaError_t refuse_unsafe(const char* call);
cudaError_t refuse_waiting(Stream* stream, const char* call);
cudaError_t refuse_captured(const Event& event, const char* call);

// ---- events.cpp

Event& event_of(cudaEvent_t handle);

// ---- memory.cpp

bool lies_in(const Ranges& ranges, const void* address, size_t nbytes = 1);

// What the host reads is no larger (counters, seeds): so much is copied also where no bytes are to move, and no more is
// filled at all.
constexpr size_t SMALL = 1 << 16;

// ---- device.cpp

cudaError_t enqueue_kernel(cudaStream_t stream, double seconds, std::function<void()> effect = nullptr);
double kernel_seconds();
double product_seconds();

}  // namespace fake
