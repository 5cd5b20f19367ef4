// Streams, events and device guards.
#include "device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <omp.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace virtual_device {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void pause(double seconds) {
  if (seconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
}

namespace {

const pid_t process = getpid();

void check_process() {
  TORCH_CHECK(getpid() == process, "a forked process cannot use the virtual device of its parent");
}

} // namespace

void Point::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  when_ = now();
  over_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_over(); });
}

namespace {

std::function<void()> to_run_once(Work work) {
  const std::uint64_t number = work.generator.has_value() ? draw(*work.generator) : 0;
  return [run = std::move(work.run), number] { run(number); };
}

} // namespace

Worker::Worker(int device, int stream) : device_(device), stream_(stream) {}

void Worker::enqueue(Work work) {
  check_process();
  raise_failure(device_);
  if (!add_to_capture(device_, stream_, work, false)) {
    push(to_run_once(std::move(work)));
  }
}

void Worker::enqueue_quietly(Work work) {
  if (!add_to_capture(device_, stream_, work, true)) {
    push(to_run_once(std::move(work)));
  }
}

bool Worker::is_captured() const {
  return capture_of(device_, stream_).has_value();
}

void Worker::push(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    std::thread(&Worker::run, this).detach();
  }
  filled_.notify_one();
}

PointPtr Worker::record() {
  check_process();
  raise_failure(device_);
  return record_quietly();
}

PointPtr Worker::record_quietly() {
  auto point = std::make_shared<Point>();
  push([point] { point->finish(); });
  return point;
}

void Worker::wait_for(PointPtr point) {
  check_not_captured(device_, stream_, "to have a stream wait across the edge of the graph");
  if (!point->is_over()) {
    check_process();
    raise_failure(device_);
    push([point = std::move(point)] { point->wait(); });
  }
}

bool Worker::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty();
}

void Worker::synchronize() {
  if (!is_idle()) {
    const PointPtr point = record();
    host_waits(device_, [&] { point->wait(); });
  }
  raise_failure(device_);
}

void Worker::run() {
  pthread_setname_np(pthread_self(), ("virtual:" + std::to_string(device_) + "." + std::to_string(stream_)).c_str());
  omp_set_num_threads(1); // of this thread's kernels
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::NoGradGuard no_grad;
  while (true) {
    std::function<void()>* task = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait(lock, [this] { return !tasks_.empty(); });
      task = &tasks_.front(); // stays where it is while others come in behind it
    }
    try {
      (*task)();
    } catch (const c10::Error& error) {
      fail(device_, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(device_, error.what());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.pop_front();
  }
}

Worker& worker(int device, int stream) {
  // Never destroyed: their threads outlive every static object.
  static auto* workers = [] {
    auto* made = new std::array<std::array<Worker*, kStreams>, kDevices>();
    for (int device = 0; device < kDevices; ++device) {
      for (int stream = 0; stream < kStreams; ++stream) {
        (*made)[device][stream] = new Worker(device, stream);
      }
    }
    return made;
  }();
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no virtual device ", device);
  TORCH_CHECK(stream >= 0 && stream < kStreams, "there is no stream ", stream);
  return *(*workers)[device][stream];
}

namespace {

thread_local int selected_device = 0;
thread_local std::array<int, kDevices> selected_streams{};

std::atomic<std::int64_t> waits{0};
std::atomic<double> waited{0};

std::mutex failures_mutex;
std::array<std::string, kDevices> failures;

int next_in_ring(int device) {
  static std::array<std::atomic<unsigned>, kDevices> taken{};
  return 1 + static_cast<int>(taken[device]++ % kRing);
}

} // namespace

int current_device() {
  return selected_device;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no virtual device ", device);
  selected_device = device;
}

c10::Stream stream_of(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream current_stream(int device) {
  return stream_of(device, selected_streams.at(device));
}

void synchronize_device(int device) {
  for (int stream = 0; stream < kStreams; ++stream) {
    worker(device, stream).synchronize();
  }
}

void host_waits(int device, const std::function<void()>& wait) {
  const double began = now();
  if (PyGILState_Check() != 0) {
    const pybind11::gil_scoped_release release;
    wait();
  } else {
    wait();
  }
  ++waits;
  double before = waited.load();
  while (!waited.compare_exchange_weak(before, before + now() - began)) {
  }
  raise_failure(device);
}

std::pair<std::int64_t, double> waits_so_far() {
  return {waits.load(), waited.load()};
}

namespace {

std::mutex notes_mutex;
std::vector<std::string> notes;
std::atomic<bool> notes_calls{false};
std::atomic<bool> clock_tells{true};

} // namespace

void set_clock(bool tells) {
  clock_tells = tells;
}

void start_noting() {
  const std::lock_guard<std::mutex> lock(notes_mutex);
  notes.clear();
  notes_calls = true;
}

std::vector<std::string> noted() {
  const std::lock_guard<std::mutex> lock(notes_mutex);
  notes_calls = false;
  return std::move(notes);
}

void note(const std::string& call) {
  if (notes_calls) {
    const std::lock_guard<std::mutex> lock(notes_mutex);
    notes.push_back(call);
  }
}

void note(const std::string& call, int device, int stream) {
  if (notes_calls) {
    note(call + " " + std::to_string(device) + "/" + std::to_string(stream));
  }
}

void fail(int device, const std::string& what) {
  const std::lock_guard<std::mutex> lock(failures_mutex);
  if (failures.at(device).empty()) {
    failures[device] = what;
  }
}

void raise_failure(int device) {
  std::string what;
  {
    const std::lock_guard<std::mutex> lock(failures_mutex);
    what.swap(failures.at(device));
  }
  TORCH_CHECK(what.empty(), "virtual device ", device, ", asynchronously: ", what);
}

namespace {

struct Event {
  PointPtr point; // of the latest record; none before the first
  bool timed = false;
  std::optional<Mark> mark; // of the latest record, if that was in a capture
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType, device, " is no virtual device");
    set_current_device(device.has_index() ? device.index() : current_device());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      selected_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return stream_of(index(device), next_in_ring(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream_of(index(device), next_in_ring(index(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    note("set_stream", stream.device_index(), static_cast<int>(stream.id()));
    const auto before = current_stream(stream.device_index());
    selected_streams.at(stream.device_index()) = static_cast<int>(stream.id());
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    auto* recorded = static_cast<Event*>(*event);
    if (recorded == nullptr) {
      note("make_event");
      *event = recorded = new Event();
      recorded->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    }
    note("record_event", stream.device_index(), static_cast<int>(stream.id()));
    recorded->mark = mark_in_capture(stream.device_index(), static_cast<int>(stream.id()));
    recorded->point = recorded->mark.has_value() ? nullptr : worker(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    note("wait_event", stream.device_index(), static_cast<int>(stream.id()));
    if (const auto* given = static_cast<Event*>(event); given != nullptr && given->mark.has_value()) {
      join_capture(*given->mark, stream.device_index(), static_cast<int>(stream.id()));
    } else if (given != nullptr) {
      worker(stream).wait_for(given->point);
    }
  }
  bool queryEvent(void* event) const override {
    note("query");
    const auto point = point_outside(event, "to query an event");
    return point == nullptr || point->is_over();
  }
  void synchronizeEvent(void* event) const override {
    note("synchronize");
    const auto point = point_outside(event, "to wait for an event");
    if (point != nullptr && !point->is_over()) {
      host_waits(current_device(), [&] { point->wait(); });
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(clock_tells, "these events do not tell the time");
    const auto *one = static_cast<Event*>(first), *two = static_cast<Event*>(second);
    TORCH_CHECK(one != nullptr && two != nullptr, "both events must be recorded before the time between them is asked for");
    TORCH_CHECK(one->point != nullptr && two->point != nullptr, "an event recorded in a capture has no time");
    TORCH_CHECK(one->timed && two->timed, "both events must have been made with enable_timing=True");
    TORCH_CHECK(one->point->is_over() && two->point->is_over(), "both events must be over");
    return (two->point->when() - one->point->when()) * 1e3;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_not_captured(stream.device_index(), static_cast<int>(stream.id()), "to query a stream");
    check_no_capture("to query a stream");
    return worker(stream).is_idle();
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return worker(stream).is_captured();
  }
#endif
  void synchronizeStream(const c10::Stream& stream) const override {
    check_not_captured(stream.device_index(), static_cast<int>(stream.id()), "to wait for a stream");
    check_no_capture("to wait for a stream");
    worker(stream).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    check_not_captured(device, "to wait for a device");
    check_no_capture("to wait for a device");
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream);
  }

 private:
  static int index(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static PointPtr point_outside(void* event, const char* call) {
    const auto* given = static_cast<Event*>(event);
    if (given != nullptr && given->mark.has_value()) {
      refuse(*given->mark, call);
    }
    check_no_capture(call);
    return given == nullptr ? nullptr : given->point;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace
} // namespace virtual_device
