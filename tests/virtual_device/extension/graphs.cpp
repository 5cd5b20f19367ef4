// Capture: what is enqueued becomes nodes. Replay: the nodes in any order that their edges allow.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <thread>
#include <unordered_map>

#if __has_include(<ATen/core/GraphImplInterface.h>) // torch 2.13 on; before it no program can begin a capture
#include <ATen/core/GraphImplInterface.h>
#define VIRTUAL_DEVICE_HAS_GRAPHS
#endif

namespace virtual_device {

namespace {

enum class Mode { kGlobal, kThreadLocal, kRelaxed };
using Edge = std::pair<std::size_t, std::size_t>;

struct Node {
  Work work;
  int stream;
  std::set<std::size_t> after; // numbers of nodes, all of which are smaller than its own
};

// One lock for all that follows: a program captures on few threads.
std::mutex mutex;
std::vector<std::shared_ptr<Capture>> captures_under_way;
std::atomic<int> number_under_way{0}; // so that who captures nothing takes no lock
std::atomic<std::int64_t> alive{0};
std::mt19937_64 orders;
std::set<Edge> left_out;

} // namespace

class Capture {
 public:
  Capture(Mode mode, int device, int stream, c10::MempoolId_t pool)
      : mode(mode), device(device), origin(stream), pool(pool), number(++made) {
    tails[stream];
    ++alive;
  }
  Capture(const Capture&) = delete;
  ~Capture() {
    --alive;
  }

  void invalidate(const std::string& call) {
    if (invalidated_by.empty()) {
      invalidated_by = call;
    }
  }

  void check_valid() const {
    TORCH_CHECK(invalidated_by.empty(), "the capture was invalidated by an earlier call: ", invalidated_by);
  }

  void add(int stream, Work work) {
    auto& tail = tails.at(stream);
    nodes.push_back({std::move(work), stream, std::move(tail)});
    tail = {nodes.size() - 1};
  }

  // Streams with work that the stream on which the capture began does not come after.
  std::set<int> unjoined() const {
    std::vector<bool> joined(nodes.size());
    for (const std::size_t node : tails.at(origin)) {
      joined[node] = true;
    }
    std::set<int> streams;
    for (std::size_t index = nodes.size(); index-- > 0;) {
      const Node& node = nodes[index];
      if (joined[index]) {
        for (const std::size_t before : node.after) {
          joined[before] = true;
        }
      } else if (node.work.kind != Kind::kFree) { // which is no work that a program enqueued
        streams.insert(node.stream);
      }
    }
    return streams;
  }

  const Mode mode;
  const std::thread::id thread = std::this_thread::get_id();
  const int device, origin;
  const c10::MempoolId_t pool;
  const std::uint64_t number;
  std::string invalidated_by;
  std::vector<Node> nodes;
  std::map<int, std::set<std::size_t>> tails; // by captured stream: what its next node comes after

 private:
  static inline std::atomic<std::uint64_t> made{0};
};

namespace {

// All of these with the lock held.

std::shared_ptr<Capture> find(int device, int stream) {
  for (const auto& capture : captures_under_way) {
    if (capture->device == device && capture->tails.count(stream) != 0) {
      return capture;
    }
  }
  return nullptr;
}

bool is_under_way(const std::shared_ptr<Capture>& capture) {
  return std::find(captures_under_way.begin(), captures_under_way.end(), capture) != captures_under_way.end();
}

[[noreturn]] void refuse_call(const char* call) {
  TORCH_CHECK(false, call, " is not permitted while a stream is being captured, and invalidates the capture");
}

void end(const std::shared_ptr<Capture>& capture) {
  captures_under_way.erase(std::remove(captures_under_way.begin(), captures_under_way.end(), capture), captures_under_way.end());
  number_under_way = static_cast<int>(captures_under_way.size());
}

} // namespace

std::uint64_t draw(const at::Generator& generator) {
  auto* source = at::check_generator<at::CPUGeneratorImpl>(generator);
  const std::lock_guard<std::mutex> lock(source->mutex_);
  return source->random64();
}

bool captures() {
  return number_under_way > 0;
}

std::optional<CaptureName> capture_of(int device, int stream) {
  if (!captures()) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto capture = find(device, stream);
  return capture == nullptr ? std::nullopt : std::optional<CaptureName>({capture->number, capture->pool});
}

bool add_to_capture(int device, int stream, Work& work, bool quietly) {
  if (!captures()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto capture = find(device, stream);
  if (capture == nullptr) {
    return false;
  }
  if (!quietly) {
    capture->check_valid();
  }
  capture->add(stream, std::move(work));
  return true;
}

std::optional<Mark> mark_in_capture(int device, int stream) {
  if (!captures()) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto capture = find(device, stream);
  return capture == nullptr ? std::nullopt : std::optional<Mark>({capture, capture->tails.at(stream)});
}

void join_capture(const Mark& mark, int device, int stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto marked = mark.capture.lock(), captured = find(device, stream);
  const bool goes_on = is_under_way(marked);
  if (!goes_on || (captured != nullptr && captured != marked)) {
    for (const auto& capture : {captured, goes_on ? marked : nullptr}) {
      if (capture != nullptr) {
        capture->invalidate("a stream waited for an event of another capture");
      }
    }
    TORCH_CHECK(false, "an event that was recorded in a capture is not permitted outside that capture");
  }
  if (stream == 0 || device != marked->device) {
    marked->invalidate("a stream that cannot be captured waited for an event of the capture");
    TORCH_CHECK(false, "the default stream, and streams of another device, cannot wait for an event of a capture");
  }
  marked->check_valid();
  marked->tails[stream].insert(mark.nodes.begin(), mark.nodes.end());
}

bool spoil_captures(const char* call) {
  if (!captures()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  bool refused = false;
  for (const auto& capture : captures_under_way) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == Mode::kGlobal || (own && capture->mode == Mode::kThreadLocal)) {
      capture->invalidate(call);
      refused = true;
    }
  }
  return refused;
}

void check_no_capture(const char* call) {
  if (spoil_captures(call)) {
    refuse_call(call);
  }
}

void check_not_captured(int device, int stream, const char* call) {
  if (!captures()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto capture = find(device, stream)) {
    capture->invalidate(call);
    refuse_call(call);
  }
}

void check_not_captured(int device, const char* call) {
  for (int stream = 0; stream < kStreams && captures(); ++stream) {
    check_not_captured(device, stream, call);
  }
}

void refuse(const Mark& mark, const char* call) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto capture = mark.capture.lock(); is_under_way(capture)) {
    capture->invalidate(call);
    refuse_call(call);
  }
  TORCH_CHECK(false, call, " is not permitted where the event was recorded in a capture");
}

void set_replays(std::uint64_t seed, const std::set<Edge>& without) {
  const std::lock_guard<std::mutex> lock(mutex);
  orders.seed(seed);
  left_out = without;
}

std::int64_t graphs_alive() {
  return alive;
}

// -- replay ---------------------------------------------------------------------------------------------------------

#ifdef VIRTUAL_DEVICE_HAS_GRAPHS
namespace {

// Nodes that follow each other, each behind the one before: what may go ahead of, or fall behind, all the rest.
std::vector<std::size_t> chains_of(const std::vector<Node>& nodes, const std::set<Edge>& without) {
  std::vector<std::size_t> chain(nodes.size()), last; // the last node of each chain
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    std::optional<std::size_t> found;
    for (const std::size_t before : nodes[index].after) {
      const bool same = nodes[before].stream == nodes[index].stream;
      if (without.count({before, index}) == 0 && last[chain[before]] == before && (same || !found.has_value())) {
        found = chain[before];
      }
    }
    if (!found.has_value()) {
      found = last.size();
      last.push_back(index);
    }
    chain[index] = *found;
    last[*found] = index;
  }
  return chain;
}

// Some order that the edges allow. Mostly one in which some chains run as early as they can, others as late as they
// can (a race shows at the ends, seldom in the middle); else each node has a priority of its own, so any order occurs.
std::vector<std::size_t> order_of(const std::vector<Node>& nodes, const std::set<Edge>& without, std::mt19937_64& random) {
  std::vector<std::size_t> priority(nodes.size());
  std::iota(priority.begin(), priority.end(), 0);
  std::shuffle(priority.begin(), priority.end(), random);
  if (random() % 4 != 0) {
    const auto chain = chains_of(nodes, without), drawn = priority;
    std::transform(chain.begin(), chain.end(), priority.begin(), [&](std::size_t number) { return drawn[number]; });
  }
  std::vector<std::vector<std::size_t>> followers(nodes.size());
  std::vector<std::size_t> waits_for(nodes.size());
  using Entry = std::pair<std::size_t, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  for (std::size_t index = 0; index < nodes.size(); ++index) {
    for (const std::size_t before : nodes[index].after) {
      if (without.count({before, index}) == 0) {
        followers[before].push_back(index);
        ++waits_for[index];
      }
    }
    if (waits_for[index] == 0) {
      ready.emplace(priority[index], index);
    }
  }
  std::vector<std::size_t> order;
  while (!ready.empty()) {
    const std::size_t index = ready.top().second;
    ready.pop();
    order.push_back(index);
    for (const std::size_t follower : followers[index]) {
      if (--waits_for[follower] == 0) {
        ready.emplace(priority[follower], follower);
      }
    }
  }
  return order;
}

// -- what torch.accelerator.Graph drives ----------------------------------------------------------------------------

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs& arguments) : keeps_(arguments.keep_graph) {}
  ~Graph() override {
    if (is_over_) {
      spoil_captures("to destroy a graph");
    }
    reset();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(capture_ == nullptr, "the graph has been captured, or is being captured; reset it first");
    const int device = current_device(), stream = static_cast<int>(current_stream(device).id());
    TORCH_CHECK(stream != 0, "a graph must be captured on a stream that is not the default one");
    static std::atomic<std::uint64_t> pools{0};
    pool_ = pool == c10::MempoolId_t{0, 0} ? c10::MempoolId_t{++pools, 0} : pool;
    const std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(find(device, stream) == nullptr, "the stream is being captured");
    const Mode chosen = mode == at::GraphCaptureMode::Relaxed ? Mode::kRelaxed
        : mode == at::GraphCaptureMode::ThreadLocal           ? Mode::kThreadLocal
                                                              : Mode::kGlobal;
    capture_ = std::make_shared<Capture>(chosen, device, stream, pool_);
    hold_pool(pool_);
    captures_under_way.push_back(capture_);
    number_under_way = static_cast<int>(captures_under_way.size());
  }

  void capture_end() override {
    TORCH_CHECK(capture_ != nullptr && !is_over_, "no capture is under way");
    {
      const std::lock_guard<std::mutex> lock(mutex);
      TORCH_CHECK(
          current_device() == capture_->device && current_stream(capture_->device).id() == capture_->origin,
          "a capture must end on the stream on which it began");
      TORCH_CHECK(
          capture_->mode == Mode::kRelaxed || capture_->thread == std::this_thread::get_id(),
          "a capture must end on the thread on which it began");
      end(capture_);
    }
    take_up_deferred(capture_->device);
    try {
      capture_->check_valid();
      const std::set<int> unjoined = capture_->unjoined();
      TORCH_CHECK(
          unjoined.empty(), "a stream was captured and has not joined: stream ", *unjoined.begin(),
          " has work that the stream on which the capture began does not wait for");
    } catch (...) {
      reset();
      throw;
    }
    is_over_ = true;
  }

  void instantiate() override { // nothing is made of the nodes before a replay
    TORCH_CHECK(keeps_, "instantiate is for a graph that was made with keep_graph=True");
    TORCH_CHECK(is_over_, "there is nothing to instantiate: no capture has ended");
  }

  void replay() override {
    TORCH_CHECK(is_over_, "there is nothing to replay: no capture has ended");
    const int device = capture_->device;
    Worker& stream = current_worker(device);
    check_not_captured(device, static_cast<int>(current_stream(device).id()), "to replay a graph");
    if (latest_ != nullptr) {
      stream.wait_for(latest_); // one run of a graph comes after another, on whichever stream
    }
    std::vector<std::uint64_t> numbers;
    for (const Node& node : capture_->nodes) {
      numbers.push_back(node.work.generator.has_value() ? draw(*node.work.generator) : 0);
    }
    std::vector<std::size_t> order;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      order = order_of(capture_->nodes, left_out, orders);
    }
    const auto run = [capture = capture_, order = std::move(order), numbers = std::move(numbers)](std::uint64_t) {
      for (const std::size_t index : order) {
        capture->nodes[index].work.run(numbers[index]);
      }
    };
    stream.enqueue({Kind::kKernel, "replay", run});
    latest_ = stream.record();
  }

  void reset() override {
    if (capture_ == nullptr) {
      return;
    }
    const int device = capture_->device;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      end(capture_);
    }
    take_up_deferred(device);
    release_pool(pool_);
    capture_ = nullptr;
    latest_ = nullptr;
    is_over_ = false;
  }

  c10::MempoolId_t pool() const override {
    TORCH_CHECK(capture_ != nullptr, "a graph has a pool once its capture has begun");
    return pool_;
  }

  void enable_debug_mode() override {
    debugs_ = true;
  }

  // As JSON: for each node what it does, to which bytes, and after which others.
  void debug_dump(const std::string& path) override {
    TORCH_CHECK(debugs_, "enable_debug_mode comes before debug_dump");
    TORCH_CHECK(is_over_, "there is nothing to dump: no capture has ended");
    std::ofstream file(path);
    const auto list = [&](const char* name, const auto& values, const auto& show) {
      file << ", \"" << name << "\": [";
      const char* comma = "";
      for (const auto& value : values) {
        file << comma;
        show(value);
        comma = ", ";
      }
      file << "]";
    };
    const auto bytes = [&](const Bytes& range) { file << "[" << range.start << ", " << range.stop << "]"; };
    constexpr const char* kKinds[] = {"kernel", "copy out", "copy in", "allocate", "free"};
    const char* comma = "[\n";
    for (const Node& node : capture_->nodes) {
      file << comma << "{\"kind\": \"" << kKinds[static_cast<int>(node.work.kind)] << "\", \"what\": \""
           << node.work.what << "\", \"stream\": " << node.stream;
      list("reads", node.work.reads, bytes);
      list("writes", node.work.writes, bytes);
      list("after", node.after, [&](std::size_t before) { file << before; });
      file << "}";
      comma = ",\n";
    }
    file << (capture_->nodes.empty() ? "[]\n" : "\n]\n");
    file.close();
    TORCH_CHECK(file, "cannot write ", path);
  }

 private:
  const bool keeps_;
  bool is_over_ = false, debugs_ = false;
  c10::MempoolId_t pool_{0, 0};
  std::shared_ptr<Capture> capture_;
  PointPtr latest_; // when the latest replay is over
};

} // namespace
#endif

} // namespace virtual_device

#ifdef VIRTUAL_DEVICE_HAS_GRAPHS
namespace at {
using VirtualGraph = virtual_device::Graph;
// By the name that the device has once it is installed, in capitals.
REGISTER_GRAPH_IMPL(VIRTUAL, VirtualGraph);
} // namespace at
#endif
