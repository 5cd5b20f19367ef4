// The parts of the virtual device, and what each offers to the others. The Python package says what it models.
#pragma once

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

// What stands in the way: somebody has come to it; it is open.
struct Barrier {
  PointPtr reached, opened;
};

// A stream: a thread with a queue.
class Worker {
 public:
  Worker(int device, int stream);
  // Runs `task` behind all that was enqueued before; what it throws is an error of the device.
  void enqueue(std::function<void()> task);
  PointPtr record();
  // The same for whoever must not raise: nobody hears of an earlier error of the device here.
  void enqueue_quietly(std::function<void()> task);
  PointPtr record_quietly();
  void wait_for(PointPtr point);
  bool is_idle();
  void synchronize();

 private:
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
// Nothing is captured: the stream only says so, and calls that would invalidate a capture raise.
void begin_capture(int device, int stream);
void end_capture(int device, int stream); // raises where a call has invalidated it
bool captures(); // whether any stream is being captured
void check_no_capture(const char* call); // raises, and invalidates the capture, where any stream is

// Has the calling thread wait, with Python's lock given back meanwhile, and counts that. Raises the device's error.
void host_waits(int device, const std::function<void()>& wait);
std::pair<std::int64_t, double> waits_so_far(); // how many times the host waited, and the seconds

// What went wrong on a device, or with memory that it used, is told at the next call that waits or enqueues.
void fail(int device, const std::string& what);
void raise_failure(int device);

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
