// Device memory that caches, pinned host memory that rounds up, registrations, and what the host must not touch.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <unordered_map>

namespace virtual_device {
namespace {

constexpr std::size_t kSpan = std::size_t{16} << 30; // of addresses, for each device
constexpr std::size_t kRound = 512;
constexpr std::size_t kSmall = std::size_t{1} << 20; // up to here blocks share segments of kSegment bytes
constexpr std::size_t kSegment = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
constexpr int kPaint = 0xFF; // every float is NaN then, every int -1

std::size_t round_up(std::size_t nbytes, std::size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

// -- the address ranges ---------------------------------------------------------------------------------------------

// The memory of one device. `base` is what tensors say; no code may touch it. `work` is where the workers find the bytes.
struct Range {
  int file = -1;
  std::byte* base = nullptr;
  std::byte* work = nullptr;

  Range() {
    file = memfd_create("virtual device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kSpan) == 0, "no memory for the virtual device");
    void* forbidden = mmap(nullptr, kSpan, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* usable = mmap(nullptr, kSpan, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(forbidden != MAP_FAILED && usable != MAP_FAILED, "no addresses for the virtual device");
    base = static_cast<std::byte*>(forbidden);
    work = static_cast<std::byte*>(usable);
  }
  bool contains(const void* pointer) const {
    return pointer >= base && pointer < base + kSpan;
  }
  void give_back(std::size_t offset, std::size_t nbytes) const {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  }
};

std::array<Range, kDevices>& ranges() {
  static auto* made = new std::array<Range, kDevices>();
  return *made;
}

struct sigaction earlier;

void tell_of_touch(int number, siginfo_t* info, void*) {
  for (int device = 0; device < kDevices; ++device) {
    if (ranges()[device].contains(info->si_addr)) {
      char text[160];
      const int length = snprintf(
          text, sizeof text, "virtual device %d: the host touched its memory at %p; only its streams may\n", device,
          info->si_addr);
      if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) {
        break;
      }
    }
  }
  sigaction(number, &earlier, nullptr); // on return the access fails again, and the earlier handler hears of it
}

// -- device memory --------------------------------------------------------------------------------------------------

struct Block {
  int device, stream;
  c10::MempoolId_t pool; // {0, 0}: no pool's
  bool small;
  std::size_t offset, size, requested = 0;
  bool used = false;
  Block *before = nullptr, *after = nullptr; // in its segment
  std::set<int> streams; // others that use it, by record_stream
  std::uint64_t capture = 0; // in which it was handed out
  std::vector<PointPtr> points; // it died, and these have not been over yet
};

struct BySize {
  bool operator()(const Block* one, const Block* other) const {
    return std::tie(one->size, one->offset) < std::tie(other->size, other->offset);
  }
};

using Pool = std::set<Block*, BySize>;
using PoolKey = std::tuple<c10::MempoolId_t, int, bool>; // whose, of which stream, and whether for small blocks

PoolKey key_of(const Block& block) {
  return {block.pool, block.stream, block.small};
}

struct Memory {
  std::mutex mutex;
  std::size_t capacity = std::size_t{4} << 30;
  std::map<PoolKey, Pool> pools;
  std::map<c10::MempoolId_t, int> holders; // of graphs' pools
  std::list<Block*> deferred; // they died in a capture, and streams that use them cannot be asked yet
  std::unordered_map<std::size_t, Block*> used; // by offset
  std::list<Block*> dying;
  std::map<std::size_t, std::size_t> holes{{0, kSpan}}; // of addresses: offset -> bytes
  c10::CachingDeviceAllocator::DeviceStats stats;
};

std::array<Memory, kDevices>& memories() {
  static auto* made = new std::array<Memory, kDevices>();
  return *made;
}

void count(c10::CachingAllocator::StatArray& stat, std::int64_t amount) {
  auto& total = stat[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  amount >= 0 ? total.increase(static_cast<std::size_t>(amount)) : total.decrease(static_cast<std::size_t>(-amount));
}

// All of these with the lock of `memory` held.

std::size_t take_addresses(Memory& memory, std::size_t nbytes) {
  for (auto hole = memory.holes.begin(); hole != memory.holes.end(); ++hole) {
    const auto [offset, size] = *hole;
    if (size >= nbytes) {
      memory.holes.erase(hole);
      if (size > nbytes) {
        memory.holes[offset + nbytes] = size - nbytes;
      }
      return offset;
    }
  }
  TORCH_CHECK(false, "no addresses left on the virtual device");
}

void return_addresses(Memory& memory, std::size_t offset, std::size_t nbytes) {
  auto next = memory.holes.lower_bound(offset);
  if (next != memory.holes.end() && next->first == offset + nbytes) {
    nbytes += next->second;
    next = memory.holes.erase(next);
  }
  if (next != memory.holes.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += nbytes;
      return;
    }
  }
  memory.holes[offset] = nbytes;
}

void into_pool(Memory& memory, Block* block) {
  Pool& pool = memory.pools[key_of(*block)];
  const auto swallow = [&](Block* neighbour) {
    if (neighbour == nullptr || neighbour->used || !neighbour->points.empty()) {
      return;
    }
    pool.erase(neighbour);
    block->offset = std::min(block->offset, neighbour->offset);
    block->size += neighbour->size;
    if (neighbour == block->before) {
      block->before = neighbour->before;
      if (block->before != nullptr) {
        block->before->after = block;
      }
    } else {
      block->after = neighbour->after;
      if (block->after != nullptr) {
        block->after->before = block;
      }
    }
    delete neighbour;
  };
  swallow(block->before);
  swallow(block->after);
  pool.insert(block);
}

void take_up_dying(Memory& memory) {
  for (auto at = memory.dying.begin(); at != memory.dying.end();) {
    auto& points = (*at)->points;
    points.erase(std::remove_if(points.begin(), points.end(), [](const auto& point) { return point->is_over(); }),
                 points.end());
    if (points.empty()) {
      count(memory.stats.active_bytes, -static_cast<std::int64_t>((*at)->size));
      into_pool(memory, *at);
      at = memory.dying.erase(at);
    } else {
      ++at;
    }
  }
}

Block* cut(Memory& memory, Block* block, std::size_t size) {
  const std::size_t rest = block->size - size;
  if (rest >= (block->small ? kRound : kSmall)) {
    auto* second = new Block{block->device, block->stream, block->pool, block->small, block->offset + size, rest};
    second->before = block;
    second->after = block->after;
    if (second->after != nullptr) {
      second->after->before = second;
    }
    block->after = second;
    block->size = size;
    memory.pools[key_of(*second)].insert(second);
  }
  return block;
}

Block* from_pool(Memory& memory, int device, int stream, c10::MempoolId_t whose, std::size_t size) {
  Block wanted{device, stream, whose, size <= kSmall, 0, size};
  Pool& pool = memory.pools[key_of(wanted)];
  const auto found = pool.lower_bound(&wanted);
  if (found == pool.end()) {
    return nullptr;
  }
  Block* block = *found;
  pool.erase(found);
  return cut(memory, block, size);
}

Block* from_system(Memory& memory, int device, int stream, c10::MempoolId_t whose, std::size_t size) {
  const bool small = size <= kSmall;
  const std::size_t segment = small ? kSegment : round_up(size, kSegment);
  auto& reserved = memory.stats.reserved_bytes[0];
  if (static_cast<std::size_t>(reserved.current) + segment > memory.capacity) {
    return nullptr;
  }
  auto* block = new Block{device, stream, whose, small, take_addresses(memory, segment), segment};
  count(memory.stats.reserved_bytes, static_cast<std::int64_t>(segment));
  ++memory.stats.num_device_alloc;
  return cut(memory, block, size);
}

void release_segments(Memory& memory) {
  for (auto& [key, pool] : memory.pools) {
    if (memory.holders.count(std::get<0>(key)) != 0) {
      continue; // a graph reads and writes there
    }
    for (auto at = pool.begin(); at != pool.end();) {
      Block* block = *at;
      if (block->before == nullptr && block->after == nullptr) {
        at = pool.erase(at);
        ranges()[block->device].give_back(block->offset, block->size);
        return_addresses(memory, block->offset, block->size);
        count(memory.stats.reserved_bytes, -static_cast<std::int64_t>(block->size));
        ++memory.stats.num_device_free;
        delete block;
      } else {
        ++at;
      }
    }
  }
}

// Without the lock: it waits.
void empty_cache(int device) {
  synchronize_device(device); // as the driver does before it takes memory back
  Memory& memory = memories()[device];
  const std::lock_guard<std::mutex> lock(memory.mutex);
  take_up_dying(memory);
  release_segments(memory);
}

Block* find_block(int device, int stream, std::size_t nbytes) {
  const auto capture = capture_of(device, stream);
  const c10::MempoolId_t whose = capture.has_value() ? capture->pool : c10::MempoolId_t{0, 0};
  const std::size_t size = round_up(nbytes, kRound);
  Memory& memory = memories()[device];
  const std::lock_guard<std::mutex> lock(memory.mutex);
  take_up_dying(memory);
  Block* block = from_pool(memory, device, stream, whose, size);
  if (block == nullptr) {
    block = from_system(memory, device, stream, whose, size);
  }
  if (block != nullptr) { // in use at once: else a neighbour that is freed would swallow it
    block->used = true;
    block->capture = capture.has_value() ? capture->number : 0;
    block->requested = nbytes;
    memory.used[block->offset] = block;
    count(memory.stats.allocated_bytes, static_cast<std::int64_t>(block->size));
    count(memory.stats.active_bytes, static_cast<std::int64_t>(block->size));
    count(memory.stats.requested_bytes, static_cast<std::int64_t>(nbytes));
  }
  return block;
}

void paint(const Block& block, std::size_t nbytes, Kind kind) {
  const Range& range = ranges()[block.device];
  const auto start = reinterpret_cast<std::uintptr_t>(range.base + block.offset);
  worker(block.device, block.stream)
      .enqueue_quietly(
          {kind,
           kind == Kind::kFree ? "memory given back" : "memory handed out",
           [bytes = range.work + block.offset, nbytes](std::uint64_t) { std::memset(bytes, kPaint, nbytes); },
           {},
           {},
           {{start, start + nbytes}}});
}

// With the lock held, of a block that is used no more.
void let_rest(Memory& memory, Block* block) {
  if (block->points.empty()) {
    count(memory.stats.active_bytes, -static_cast<std::int64_t>(block->size));
    into_pool(memory, block);
  } else {
    memory.dying.push_back(block);
  }
}

void record_uses(Block* block) {
  for (const int stream : block->streams) {
    block->points.push_back(worker(block->device, stream).record_quietly());
  }
  block->streams.clear();
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Memory& memory = memories()[block->device];
  const auto capture = capture_of(block->device, block->stream);
  const bool in_graph = capture.has_value() && capture->number == block->capture;
  const bool deferred = !block->streams.empty() && captures(); // as torch has it: an event of a capture is no moment
  if (in_graph && !deferred) { // its next owner may write at once, so each replay does
    paint(*block, block->requested, Kind::kFree);
  }
  if (!deferred) {
    record_uses(block);
  }
  const std::lock_guard<std::mutex> lock(memory.mutex);
  memory.used.erase(block->offset);
  count(memory.stats.allocated_bytes, -static_cast<std::int64_t>(block->size));
  count(memory.stats.requested_bytes, -static_cast<std::int64_t>(block->requested));
  if (deferred) {
    memory.deferred.push_back(block);
    return; // and a neighbour takes it for used
  }
  block->used = false;
  let_rest(memory, block);
}

void free_nothing(void*) {}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const int device = current_device();
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) {
      return {nullptr, nullptr, &free_nothing, where};
    }
    raise_failure(device);
    Memory& memory = memories()[device];
    const int stream = static_cast<int>(current_stream(device).id());
    note("empty " + std::to_string(nbytes) + " on", device, stream);
    Block* block = find_block(device, stream, nbytes);
    if (block == nullptr && !captures()) { // as torch has it: the cache may be a graph's
      ++memory.stats.num_alloc_retries;
      empty_cache(device);
      block = find_block(device, stream, nbytes);
    }
    if (block == nullptr) {
      ++memory.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "virtual device ", device, " out of memory. Tried to allocate ", nbytes, " bytes; ",
          memory.stats.allocated_bytes[0].current, " of ", memory.capacity, " bytes are allocated");
    }
    // By the stream that the block belongs to: work on another one has to come after this.
    paint(*block, nbytes, Kind::kAllocate);
    return {ranges()[device].base + block->offset, block, &free_block, where};
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    const auto run = [to = for_workers(target), from = for_workers(source), nbytes](std::uint64_t) {
      std::memcpy(to, from, nbytes);
    };
    const auto read = reinterpret_cast<std::uintptr_t>(source), written = reinterpret_cast<std::uintptr_t>(target);
    current_worker(current_device())
        .enqueue({Kind::kKernel, "copy of a storage", run, {}, {{read, read + nbytes}}, {{written, written + nbytes}}});
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    check_no_capture("to give cached memory back");
    for (int device = 0; device < kDevices; ++device) {
      empty_cache(device);
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Memory& memory = memories().at(device);
    const std::lock_guard<std::mutex> lock(memory.mutex);
    return memory.stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Memory& memory = memories().at(device);
    const std::lock_guard<std::mutex> lock(memory.mutex);
    const auto reserved = static_cast<std::size_t>(memory.stats.reserved_bytes[0].current);
    return {memory.capacity - std::min(reserved, memory.capacity), memory.capacity};
  }

 private:
  template <typename F>
  static void for_each_stat(int device, F reset) {
    Memory& memory = memories().at(device);
    const std::lock_guard<std::mutex> lock(memory.mutex);
    auto& stats = memory.stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      reset((*array)[0]);
    }
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// -- pinned memory --------------------------------------------------------------------------------------------------

struct Pinned {
  std::size_t size = 0;
  bool used = true; // else it waits for the next request of its size
  bool registered = false; // by the driver's call: not ours to hand out
  std::vector<PointPtr> points; // copies that have not been over
};

std::mutex host_mutex;

std::map<std::uintptr_t, Pinned>& host_ranges() {
  static auto* made = new std::map<std::uintptr_t, Pinned>();
  return *made;
}

// With the lock held: the pinned range that `address` lies in, or the end.
std::map<std::uintptr_t, Pinned>::iterator pinned_at(std::uintptr_t address) {
  auto found = host_ranges().upper_bound(address);
  if (found == host_ranges().begin()) {
    return host_ranges().end();
  }
  --found;
  return address < found->first + found->second.size ? found : host_ranges().end();
}

bool rests(Pinned& range) {
  auto& points = range.points;
  points.erase(std::remove_if(points.begin(), points.end(), [](const auto& point) { return point->is_over(); }),
               points.end());
  return points.empty();
}

void free_pinned(void* pointer) {
  const std::lock_guard<std::mutex> lock(host_mutex);
  host_ranges().at(reinterpret_cast<std::uintptr_t>(pointer)).used = false;
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &free_nothing, c10::Device(c10::kCPU)};
    }
    std::size_t size = kRound;
    while (size < nbytes) {
      size *= 2;
    }
    const std::lock_guard<std::mutex> lock(host_mutex);
    for (auto& [address, range] : host_ranges()) {
      if (!range.used && !range.registered && range.size == size && rests(range)) {
        range.used = true;
        return pointer_to(address);
      }
    }
    check_no_capture("to pin more memory");
    void* memory = std::aligned_alloc(kPage, round_up(size, kPage));
    TORCH_CHECK(memory != nullptr, "no host memory to pin");
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    host_ranges()[address].size = size;
    return pointer_to(address);
  }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    if (!worker(stream).is_captured()) { // whose replays come when they come: who owns the graph keeps the memory
      note_copy(pointer, worker(stream).record());
    }
    return true;
  }
  void empty_cache() override {
    const std::lock_guard<std::mutex> lock(host_mutex);
    for (auto at = host_ranges().begin(); at != host_ranges().end();) {
      if (!at->second.used && !at->second.registered && rests(at->second)) {
        std::free(reinterpret_cast<void*>(at->first));
        at = host_ranges().erase(at);
      } else {
        ++at;
      }
    }
  }
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static c10::DataPtr pointer_to(std::uintptr_t address) {
    auto* memory = reinterpret_cast<void*>(address);
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }
};

PinnedAllocator pinned_allocator;

} // namespace

void* for_workers(const void* pointer) {
  if (pointer == nullptr) {
    return nullptr;
  }
  for (auto& range : ranges()) {
    if (range.contains(pointer)) {
      return range.work + (static_cast<const std::byte*>(pointer) - range.base);
    }
  }
  TORCH_CHECK(false, pointer, " is no memory of the virtual device");
}

bool is_device_memory(const void* pointer) {
  return std::any_of(ranges().begin(), ranges().end(), [&](const Range& range) { return range.contains(pointer); });
}

HostMemory kind_of(const void* pointer, std::size_t nbytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(host_mutex);
  const auto found = pinned_at(first);
  if (found == host_ranges().end()) {
    const auto next = host_ranges().lower_bound(first);
    TORCH_CHECK(
        next == host_ranges().end() || next->first >= first + nbytes,
        "invalid argument: a copy begins in pageable memory and goes on in pinned memory");
    return HostMemory::kPageable;
  }
  TORCH_CHECK(
      first + nbytes <= found->first + found->second.size,
      "invalid argument: a copy goes on beyond the registration or the pinned block in which it begins");
  return HostMemory::kPinned;
}

void note_copy(const void* pointer, const PointPtr& point) {
  const std::lock_guard<std::mutex> lock(host_mutex);
  const auto found = pinned_at(reinterpret_cast<std::uintptr_t>(pointer));
  if (found != host_ranges().end()) {
    rests(found->second);
    found->second.points.push_back(point);
  }
}

int register_host(std::uintptr_t pointer, std::size_t nbytes) {
  constexpr int kInvalidValue = 1, kAlreadyRegistered = 712;
  check_no_capture("to register memory");
  if (nbytes == 0) {
    return kInvalidValue;
  }
  const std::lock_guard<std::mutex> lock(host_mutex);
  const auto next = host_ranges().lower_bound(pointer);
  if (pinned_at(pointer) != host_ranges().end() || (next != host_ranges().end() && next->first < pointer + nbytes)) {
    return kAlreadyRegistered;
  }
  Pinned& range = host_ranges()[pointer];
  range.size = nbytes;
  range.registered = true;
  return 0;
}

int unregister_host(std::uintptr_t pointer) {
  constexpr int kNotRegistered = 713;
  check_no_capture("to unregister memory");
  const std::lock_guard<std::mutex> lock(host_mutex);
  const auto found = host_ranges().find(pointer);
  if (found == host_ranges().end() || !found->second.registered) {
    return kNotRegistered;
  }
  if (!rests(found->second)) { // a GPU would read or write pages that are another tensor's by now
    fail(current_device(), "host memory was unregistered while a copy used it");
  }
  host_ranges().erase(found);
  return 0;
}

void hold_pool(c10::MempoolId_t pool) {
  for (Memory& memory : memories()) {
    const std::lock_guard<std::mutex> lock(memory.mutex);
    ++memory.holders[pool];
  }
}

void release_pool(c10::MempoolId_t pool) {
  for (Memory& memory : memories()) {
    const std::lock_guard<std::mutex> lock(memory.mutex);
    if (--memory.holders.at(pool) == 0) {
      memory.holders.erase(pool);
    }
  }
}

void take_up_deferred(int device) {
  if (captures()) {
    return; // the last one to end does it
  }
  Memory& memory = memories()[device];
  const std::lock_guard<std::mutex> lock(memory.mutex);
  while (!memory.deferred.empty()) {
    Block* block = memory.deferred.front();
    memory.deferred.pop_front();
    block->used = false;
    record_uses(block);
    let_rest(memory, block);
  }
}

void set_capacity(int device, std::size_t nbytes) {
  Memory& memory = memories().at(device);
  const std::lock_guard<std::mutex> lock(memory.mutex);
  memory.capacity = std::min(nbytes, kSpan);
}

void record_stream(const void* pointer, c10::Stream stream) {
  for (int device = 0; device < kDevices; ++device) {
    const Range& range = ranges()[device];
    if (range.contains(pointer)) {
      Memory& memory = memories()[device];
      const std::lock_guard<std::mutex> lock(memory.mutex);
      const auto found = memory.used.find(static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - range.base));
      if (found != memory.used.end() && found->second->stream != stream.id()) {
        found->second->streams.insert(static_cast<int>(stream.id()));
      }
    }
  }
}

namespace {

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) {
      set_current_device(device);
    }
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void* pointer) const override {
    const std::lock_guard<std::mutex> lock(host_mutex);
    return pinned_at(reinterpret_cast<std::uintptr_t>(pointer)) != host_ranges().end();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    for (int device = 0; device < kDevices; ++device) {
      if (ranges()[device].contains(pointer)) {
        return c10::Device(kType, static_cast<c10::DeviceIndex>(device));
      }
    }
    TORCH_CHECK(false, pointer, " is no memory of the virtual device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(impl->device());
    c10::DataPtr fresh = allocator.allocate(nbytes);
    const std::size_t kept = std::min(nbytes, impl->nbytes());
    if (kept > 0) {
      allocator.copy_data(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

[[maybe_unused]] const bool installed = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(kType, &pinned_allocator);
  ranges();
  struct sigaction ours {};
  ours.sa_sigaction = &tell_of_touch;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &earlier);
  return true;
}();

} // namespace
} // namespace virtual_device
