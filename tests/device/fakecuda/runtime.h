// Streams, events and memory of the fake device: what a CUDA driver and torch's caching allocator do.
//
// Kernels run at once, on the thread that launches them. Three things make a wrong program give wrong data:
//
// - A copy between pinned memory and the device that does not block happens as late as CUDA allows. Its device
//   side is done before the next kernel of the same stream; what the host receives appears when the host waits.
// - Freed memory goes back to the stream that allocated it and is handed out again at once, filled with 0x7f,
//   unless `record_stream` named another stream whose work the host does not know to be done.
// - Kernels of two streams run in program order here, and in any order on a GPU. So each stream knows how far it
//   has waited for each other one (a vector clock), each block who wrote and read it last, and an access that
//   no wait orders is reported as a race.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fakecuda {

using c10::DeviceIndex;
using c10::StreamId;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int FRESH = 0x7f; // float32 3.4e38, float16 and bfloat16 NaN or huge, int64 9e18: never plausible

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}
inline int device_count() {
  static const int count = static_cast<int>(setting("FAKECUDA_DEVICES", 2));
  return count;
}

// ---- What is reported to Python. Never called under the lock: Python waits for its own lock, and a thread that
// holds that one may be waiting for ours.
using Report = void (*)(const char*);
inline Report on_wait = nullptr, on_race = nullptr;
inline void host_waits(const char* reason) {
  if (on_wait) on_wait(reason);
}

// ---- The lock. Objects of Python die when copies are dropped, so these are dropped after it is open again.
using Work = std::function<void()>;
inline std::recursive_mutex mutex;
inline thread_local int depth = 0;
inline thread_local std::vector<Work> finished;
inline thread_local std::vector<std::string> races;
struct Lock {
  Lock() {
    mutex.lock();
    depth++;
  }
  ~Lock() {
    const bool outermost = --depth == 0;
    mutex.unlock();
    if (!outermost) return;
    auto dropped = std::move(finished);
    finished.clear();
    auto seen = std::move(races);
    races.clear();
    for (const auto& text : seen)
      if (on_race) on_race(text.c_str());
  }
};

// ---- Streams
using Key = std::pair<DeviceIndex, StreamId>;
using Clock = std::map<Key, uint64_t>;
struct Pending {
  uint64_t position;
  Work work;
};
struct Delivery {
  uint64_t position;
  char *begin, *end; // of the host memory
  Work work;
};
struct StreamState {
  uint64_t issued = 0; // position of the newest work
  std::deque<Pending> copies; // not executed yet
  std::deque<Delivery> deliveries; // executed, and the host does not know it
  Clock known; // the work of other streams that this one has waited for
};
inline std::map<Key, StreamState> streams;
inline Clock host; // the work that the host knows to be done
inline std::atomic<StreamId> next_stream{1};
inline thread_local DeviceIndex current = 0;
inline thread_local std::map<DeviceIndex, StreamId> current_stream;

inline Key stream_of(DeviceIndex device) { return {device, current_stream[device]}; }
inline Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
inline std::string name_of(const Key& key) {
  return "stream " + std::to_string(key.second) + " of cuda:" + std::to_string(key.first);
}
inline void merge(Clock& into, const Clock& from) {
  for (const auto& [key, position] : from) into[key] = std::max(into[key], position);
}

// Execute what a stream has queued, up to a position: its next kernel starts, or another stream waits for it.
inline void advance(const Key& key, uint64_t position = UINT64_MAX) {
  Lock lock;
  auto& stream = streams[key];
  while (!stream.copies.empty() && stream.copies.front().position <= position) {
    auto work = std::move(stream.copies.front().work);
    stream.copies.pop_front();
    work();
    finished.push_back(std::move(work));
  }
}

// The host learns that a stream has come to a position: what was copied to the host appears there.
inline void complete(const Key& key, uint64_t position) {
  Lock lock;
  advance(key, position);
  auto& stream = streams[key];
  host[key] = std::max(host[key], std::min(position, stream.issued));
  while (!stream.deliveries.empty() && stream.deliveries.front().position <= position) {
    auto work = std::move(stream.deliveries.front().work);
    stream.deliveries.pop_front();
    work();
    finished.push_back(std::move(work));
  }
}
inline void complete(const Clock& clock) {
  for (const auto& [key, position] : clock) complete(key, position);
}
inline void complete_stream(const Key& key) {
  Lock lock;
  complete(Clock(streams[key].known)); // a stream is done when what it has waited for is done
  complete(key, streams[key].issued);
}
inline void complete_device(DeviceIndex device) {
  Lock lock;
  std::vector<Key> keys;
  for (const auto& [key, stream] : streams)
    if (key.first == device) keys.push_back(key);
  for (const auto& key : keys) complete_stream(key);
}

// Give work its place in a stream. Whatever the host knows to be done is done before it.
inline uint64_t next_position(const Key& key) {
  auto& stream = streams[key];
  merge(stream.known, host);
  return ++stream.issued;
}
inline void enqueue(const Key& key, uint64_t position, Work work) {
  streams[key].copies.push_back({position, std::move(work)});
}

// The data of a copy to the host, for a later copy of an ordered stream back from there: no wait of the host is
// needed between the two.
inline void deliver_for(const Key& key, const void* begin, size_t bytes) {
  auto* from = static_cast<const char*>(begin);
  for (auto& [other, stream] : streams) {
    const auto known = other == key ? UINT64_MAX : streams[key].known[other];
    for (auto& delivery : stream.deliveries)
      if (delivery.position <= known && delivery.begin < from + bytes && from < delivery.end) delivery.work();
  }
}

// ---- Events
struct Event {
  Clock clock; // the stream's position, and what it had waited for by then
  bool asked = false;
  std::chrono::steady_clock::time_point at;
};
inline void record(Event& event, const Key& key) {
  Lock lock;
  const auto position = next_position(key);
  event = {streams[key].known, false, std::chrono::steady_clock::now()};
  event.clock[key] = position;
}
inline void block(const Event& event, const Key& key) {
  Lock lock;
  const auto position = next_position(key);
  merge(streams[key].known, event.clock);
  auto clock = event.clock;
  clock.erase(key);
  enqueue(key, position, [clock] {
    for (const auto& [other, until] : clock) advance(other, until);
  });
}
// Not done when it is asked first, if anything is left to do: a program that asks once must not rely on it.
inline bool query(Event& event) {
  Lock lock;
  bool done = true;
  for (const auto& [key, position] : event.clock) {
    const auto& stream = streams[key];
    if (!stream.copies.empty() && stream.copies.front().position <= position) done = false;
    if (!stream.deliveries.empty() && stream.deliveries.front().position <= position) done = false;
  }
  if (!done && !std::exchange(event.asked, true)) return false;
  complete(event.clock);
  return true;
}

// ---- Memory
struct Access {
  Key stream;
  uint64_t position = 0;
};
struct Block {
  char* begin = nullptr;
  size_t size = 0, requested = 0;
  Key stream; // that allocated it
  std::set<Key> used_on; // by record_stream
  std::vector<Access> waits; // freed, and kept until these are done
  Access writer;
  Clock readers;
};
struct Memory {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, total = 0, freed = 0, count = 0, live = 0;
  int64_t retries = 0, out_of_memory = 0, limit = setting("FAKECUDA_BYTES", int64_t(80) << 30);
};
inline std::map<DeviceIndex, Memory> memory;
inline std::map<uintptr_t, Block*> live; // by address
inline std::map<std::pair<Key, size_t>, std::vector<Block*>> cached;
inline std::vector<Block*> leaving; // freed by their owner, maybe in use on another stream

inline Block* block_of(const void* address) {
  auto found = live.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == live.begin()) return nullptr;
  auto* block = std::prev(found)->second;
  return static_cast<const char*>(address) < block->begin + block->size ? block : nullptr;
}

inline bool ordered(const Key& key, const Access& before) {
  if (before.position == 0 || before.stream == key) return true;
  auto& known = streams[key].known;
  auto found = known.find(before.stream);
  return found != known.end() && found->second >= before.position;
}
inline void report(const std::string& what, const Key& key, const Key& other) {
  races.push_back(what + ": " + name_of(key) + " has not waited for " + name_of(other));
}
// Note that work of a stream reads or writes memory; a race if nothing orders it after what others did there.
inline void touch(const void* address, const Key& key, uint64_t position, bool writes, const std::string& name) {
  auto* block = block_of(address);
  if (!block) return;
  if (!ordered(key, block->writer)) report(name + (writes ? " overwrites" : " reads") + " what is being written", key, block->writer.stream);
  if (writes) {
    for (const auto& [other, last] : block->readers)
      if (!ordered(key, {other, last})) report(name + " overwrites what is being read", key, other);
    block->writer = {key, position};
    block->readers.clear();
  } else {
    block->readers[key] = position;
  }
}

inline void recycle(Block* block) { cached[{block->stream, block->size}].push_back(block); }
// Blocks whose other streams are known to be done can be used again.
inline void process_leaving() {
  std::vector<Block*> stay;
  for (auto* block : leaving) {
    const bool done = std::all_of(block->waits.begin(), block->waits.end(), [](const Access& wait) {
      return host[wait.stream] >= wait.position;
    });
    if (done) {
      block->waits.clear();
      recycle(block);
    } else {
      stay.push_back(block);
    }
  }
  leaving = std::move(stay);
}
inline void free_device_memory(void* address) {
  Lock lock;
  auto found = live.find(reinterpret_cast<uintptr_t>(address));
  if (found == live.end()) return;
  auto* block = found->second;
  live.erase(found);
  auto& stats = memory[block->stream.first];
  stats.allocated -= block->size;
  stats.freed += block->size;
  stats.live--;
  for (const auto& key : block->used_on) block->waits.push_back({key, streams[key].issued});
  block->used_on.clear();
  if (block->waits.empty()) {
    recycle(block);
  } else {
    leaving.push_back(block);
  }
}
// Give cached blocks back to the system, which waits for the device.
inline void empty_cache(DeviceIndex device) {
  Lock lock;
  complete_device(device);
  process_leaving();
  for (auto& [key, blocks] : cached) {
    if (key.first.first != device) continue;
    for (auto* block : blocks) {
      memory[device].reserved -= block->size;
      std::free(block->begin);
      delete block;
    }
    blocks.clear();
  }
}
inline bool fits(DeviceIndex device, size_t size) {
  Lock lock;
  process_leaving();
  auto found = cached.find({stream_of(device), size});
  if (found != cached.end() && !found->second.empty()) return true;
  return memory[device].reserved + static_cast<int64_t>(size) <= memory[device].limit;
}
inline std::string mebibytes(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

inline void* allocate_device_memory(DeviceIndex device, size_t bytes) {
  const size_t size = std::max<size_t>(1, (bytes + 511) / 512) * 512;
  if (!fits(device, size)) {
    host_waits("allocation that empties the cache");
    Lock lock;
    memory[device].retries++;
    empty_cache(device);
    if (!fits(device, size)) {
      auto& stats = memory[device];
      stats.out_of_memory++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mebibytes(size), ". Fake device ",
        int(device), " has a total capacity of ", mebibytes(stats.limit), " of which ", mebibytes(stats.limit - stats.reserved), " is free.");
    }
  }
  Lock lock;
  const auto key = stream_of(device);
  auto& stats = memory[device];
  auto& ready = cached[{key, size}];
  Block* block = nullptr;
  if (!ready.empty()) {
    block = ready.back(); // the newest, so that a use after free is seen soon
    ready.pop_back();
    merge(streams[key].known, host);
    advance(key); // its own stream uses it again after the copies from and to the old tensor
    if (!ordered(key, block->writer)) report("memory is handed out again while it is being written", key, block->writer.stream);
    for (const auto& [other, last] : block->readers)
      if (!ordered(key, {other, last})) report("memory is handed out again while it is being read", key, other);
    block->writer = {};
    block->readers.clear();
  } else {
    block = new Block;
    block->begin = static_cast<char*>(std::aligned_alloc(512, size));
    block->size = size;
    block->stream = key;
    stats.reserved += size;
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
  }
  block->requested = bytes;
  std::memset(block->begin, FRESH, size);
  live[reinterpret_cast<uintptr_t>(block->begin)] = block;
  stats.allocated += size;
  stats.total += size;
  stats.count++;
  stats.live++;
  stats.peak = std::max(stats.peak, stats.allocated);
  return block->begin;
}

// Blocks of a device: address, size, requested size, stream, and 1 where it is allocated, 0 where it is cached.
inline int64_t list_blocks(DeviceIndex device, int64_t* out, int64_t room) {
  Lock lock;
  int64_t count = 0;
  const auto add = [&](const Block* block, bool allocated) {
    if (block->stream.first != device) return;
    if (count < room) {
      const int64_t row[] = {reinterpret_cast<int64_t>(block->begin), static_cast<int64_t>(block->size),
                             static_cast<int64_t>(block->requested), block->stream.second, allocated};
      std::copy(row, row + 5, out + 5 * count);
    }
    count++;
  };
  for (const auto& [address, block] : live) add(block, true);
  for (const auto* block : leaving) add(block, false);
  for (const auto& [key, blocks] : cached)
    for (const auto* block : blocks) add(block, false);
  return count;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return on(current, bytes); }
  c10::DataPtr on(DeviceIndex device, size_t bytes) {
    if (bytes == 0) return {nullptr, c10::Device(CUDA, device)};
    auto* address = allocate_device_memory(device, bytes);
    return {address, address, &free_device_memory, c10::Device(CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    host_waits("empty_cache");
    for (int device = 0; device < device_count(); device++) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    auto* block = block_of(data.get());
    if (block && block->stream != key_of(stream)) block->used_on.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock;
    const auto& stats = memory[device];
    c10::CachingDeviceAllocator::DeviceStats out;
    const auto fill = [](c10::CachingAllocator::StatArray& into, int64_t now, int64_t peak, int64_t total, int64_t freed) {
      for (auto& stat : into) {
        stat.current = now;
        stat.peak = peak;
        stat.allocated = total;
        stat.freed = freed;
      }
    };
    for (auto* bytes : {&out.allocated_bytes, &out.active_bytes, &out.requested_bytes})
      fill(*bytes, stats.allocated, stats.peak, stats.total, stats.freed);
    fill(out.reserved_bytes, stats.reserved, stats.reserved_peak, stats.reserved_peak, 0);
    fill(out.allocation, stats.live, stats.live, stats.count, stats.count - stats.live);
    out.num_alloc_retries = stats.retries;
    out.num_ooms = stats.out_of_memory;
    return out;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Lock lock;
    auto& stats = memory[device];
    stats.total = stats.freed = stats.retries = stats.out_of_memory = 0;
    stats.count = stats.live;
  }
  void resetPeakStats(DeviceIndex device) override {
    Lock lock;
    memory[device].peak = memory[device].allocated;
    memory[device].reserved_peak = memory[device].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock;
    return {memory[device].limit - memory[device].reserved, memory[device].limit};
  }
};
// Never destroyed: tensors of Python may outlive static objects.
inline DeviceMemory& device_memory = *new DeviceMemory;

// ---- The memory of kernels. They run as kernels of the CPU, which ask the CPU's allocator; on a thread that
// runs one for the device they receive device memory, so that limits and reuse hold for their results too.
inline thread_local DeviceIndex kernel_device = -1;
struct KernelMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (kernel_device < 0 || bytes == 0) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    auto* address = allocate_device_memory(kernel_device, bytes);
    return {address, address, &free_device_memory, c10::Device(c10::DeviceType::CPU)};
  }
  // Who takes memory by `raw_allocate`, as oneDNN does for bf16, gives it back by this, on any thread: without
  // asking, device memory would go to the system and stay in the statistics.
  static void free_either(void* address) {
    {
      Lock lock;
      if (live.count(reinterpret_cast<uintptr_t>(address))) return free_device_memory(address);
    }
    c10::GetDefaultCPUAllocator()->raw_deleter()(address);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_either; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return c10::GetDefaultCPUAllocator()->is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline KernelMemory& kernel_memory = *new KernelMemory;
struct InKernel {
  DeviceIndex before = kernel_device;
  explicit InKernel(DeviceIndex device) { kernel_device = device; }
  ~InKernel() { kernel_device = before; }
};

// ---- Pinned host memory, from torch's allocator or by cudaHostRegister
inline std::map<uintptr_t, size_t> pinned;
inline bool is_pinned(const void* address) {
  Lock lock;
  auto found = pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == pinned.begin()) return false;
  --found;
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second;
}
inline void free_pinned(void* address) {
  if (!address) return;
  {
    Lock lock;
    pinned.erase(reinterpret_cast<uintptr_t>(address));
  }
  std::free(address);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(address, FRESH, bytes);
    Lock lock;
    pinned[reinterpret_cast<uintptr_t>(address)] = bytes;
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedMemory& pinned_memory = *new PinnedMemory;

} // namespace fakecuda
