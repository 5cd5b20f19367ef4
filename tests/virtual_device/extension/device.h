// The parts of the virtual device, and what each offers to the others. The Python package says what it models.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace virtual_device {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
// Stream 0 is the default one; the others are handed out in a ring, so that the 33rd is the first again.
constexpr int kRing = 32;
constexpr int kStreams = kRing + 1;

double now(); // seconds, on a clock that only grows
void pause(double seconds); // of the calling thread; not at all for 0

// -- streams.cpp ----------------------------------------------------------------------------------------------------

// One record of an event: over when the stream has come to it.
class Point {
 public:
  bool is_over() const {
    return over_.load(std::memory_order_acquire);
  }
  void finish();
  void wait();
  double when() const {
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> over_{false};
  double when_ = 0;
};
using PointPtr = std::shared_ptr<Point>;

// What stands in the way: a copy has come to it; it is open.
struct Barrier {
  PointPtr reached, opened;
};

// Addresses that a piece of work reads or writes, as tensors have them, from the first byte to the last element's end.
struct Bytes {
  std::uintptr_t start, stop;
};

enum class Kind { kKernel, kCopyOut, kCopyIn, kAllocate, kFree };

// What can be enqueued. A graph keeps it, and runs it again and again.
struct Work {
  Kind kind;
  std::string what;
  std::function<void(std::uint64_t)> run; // the argument: what random numbers start from
  std::optional<at::Generator> generator{}; // that `run` wants a number from, each time it is enqueued or replayed
  std::vector<Bytes> reads{}, writes{};
};

// A stream: a thread with a queue.
class Worker {
 public:
  Worker(int device, int stream);
  // Runs `work` behind all that was enqueued before; what it throws is an error of the device. Where the stream is
  // being captured the work becomes a node of the graph, and nothing runs.
  void enqueue(Work work);
  PointPtr record();
  // The same for callers that must not raise: an earlier error of the device is not reported here.
  void enqueue_quietly(Work work);
  PointPtr record_quietly();
  void wait_for(PointPtr point);
  bool is_idle();
  void synchronize();
  bool is_captured() const;

 private:
  void push(std::function<void()> task);
  void run();

  const int device_, stream_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> tasks_; // in front, what is being run
  bool started_ = false;
};

Worker& worker(int device, int stream);
inline Worker& worker(c10::Stream stream) {
  return worker(stream.device_index(), static_cast<int>(stream.id()));
}

int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device);
c10::Stream stream_of(int device, int id);
inline Worker& current_worker(int device) {
  return worker(current_stream(device));
}
void synchronize_device(int device);
// Has the calling thread wait, with Python's lock given back meanwhile, and counts that. Raises the device's error.
void host_waits(int device, const std::function<void()>& wait);
std::pair<std::int64_t, double> waits_so_far(); // how many times the host waited, and the seconds

void set_clock(bool tells); // whether events tell the time
// Calls for copies, memory, events and streams are written down between the two, such as `wait_event 0/3`.
void start_noting();
std::vector<std::string> noted();
void note(const std::string& call); // nothing where no one notes
void note(const std::string& call, int device, int stream);

// What went wrong on a device, or with memory that it used, is told at the next call that waits or enqueues.
void fail(int device, const std::string& what);
void raise_failure(int device);

// -- graphs.cpp -----------------------------------------------------------------------------------------------------

class Capture;

// What an event stands for that was recorded in a capture: nodes of the graph, and no moment.
struct Mark {
  std::weak_ptr<Capture> capture;
  std::set<std::size_t> nodes;
};

// A capture as the allocator knows it.
struct CaptureName {
  std::uint64_t number;
  c10::MempoolId_t pool;
};

std::uint64_t draw(const at::Generator& generator); // the next number of a CPU generator
bool captures(); // whether any stream is being captured
std::optional<CaptureName> capture_of(int device, int stream);
// Makes `work` a node where the stream is being captured, and says whether it is. Raises where a call has invalidated
// the capture, unless `quietly`.
bool add_to_capture(int device, int stream, Work& work, bool quietly);
std::optional<Mark> mark_in_capture(int device, int stream);
// The stream comes after what `mark` stands for, and is captured from here on if it has not been.
void join_capture(const Mark& mark, int device, int stream);
// Each raises, and invalidates the captures in whose way the call is: calls that a driver calls unsafe, by the mode of
// the capture; calls about a captured stream or device, or an event recorded in a capture, in every mode.
void check_no_capture(const char* call);
// The same for callers that cannot raise; whether it has invalidated one.
bool spoil_captures(const char* call);
void check_not_captured(int device, int stream, const char* call);
void check_not_captured(int device, const char* call);
[[noreturn]] void refuse(const Mark& mark, const char* call);

// The order of replays from here on, and edges that they do not keep.
void set_replays(std::uint64_t seed, const std::set<std::pair<std::size_t, std::size_t>>& without);
std::int64_t graphs_alive(); // captures, and what they ended in

// -- memory.cpp -----------------------------------------------------------------------------------------------------

// Device memory is mapped twice: tensors have the address that the host may not touch, workers use the other one.
void* for_workers(const void* device_pointer);
bool is_device_memory(const void* pointer);

enum class HostMemory { kPageable, kPinned };
// Raises where a part of the bytes is pinned and a part is not, or two registrations meet in them.
HostMemory kind_of(const void* pointer, std::size_t nbytes);
// `point` is over when a copy has done with pinned bytes at `pointer`.
void note_copy(const void* pointer, const PointPtr& point);
int register_host(std::uintptr_t pointer, std::size_t nbytes); // 0, or CUDA's number for the error
int unregister_host(std::uintptr_t pointer);

// A graph's memory stays its own between these two, each as often as the other.
void hold_pool(c10::MempoolId_t pool);
void release_pool(c10::MempoolId_t pool);
// Blocks that died in a capture while other streams used them can be waited for now.
void take_up_deferred(int device);
void set_capacity(int device, std::size_t nbytes);
void record_stream(const void* pointer, c10::Stream stream);

// -- operators.cpp --------------------------------------------------------------------------------------------------

enum class Direction { kOut, kIn };
// Seconds before the first byte, and bytes in a second (0: as fast as memory is).
void set_link(Direction direction, double latency, double bandwidth);
// Copies of this direction stand still from now on, until the barrier is opened.
Barrier hold_link(Direction direction);
// Seconds that an operator takes longer than its kernel; of all others for an empty name.
void set_delay(const std::string& name, double seconds);
void clear_delays();
std::pair<std::int64_t, std::int64_t> copied_bytes(); // out, in

} // namespace virtual_device
