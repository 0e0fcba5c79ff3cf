// A CUDA device in host memory, for a build of torch without CUDA.
//
// Such a build knows the device type CUDA, its autocast rules and its autograd, and has no kernels, hooks, guard
// or allocator for it. This file registers them: tensors say "cuda:0", are refused where a GPU's would be, and
// are computed by the kernels of the CPU. `runtime.h` has the streams and the memory.
//
// Relied on in torch 2.13: the registry key "CUDAHooks", the boxed fallback of a dispatch key, and that the
// hooks are asked for once, so that this library is loaded before torch is imported.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_map>

namespace {
using namespace fakecuda;
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::Stream;
using Sizes = c10::SymIntArrayRef;

DeviceIndex index_or_current(DeviceIndex device) { return device < 0 ? current : device; }
void set_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal");
  current = device;
}

// ---- Random numbers. The state has the size of CUDA's, 16 bytes: seed and offset. Each kernel draws from a
// generator of the CPU seeded with both, and moves the offset on. The numbers are not those of a GPU.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size: ", state.numel(), " bytes, and a CUDA generator has 16");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* bytes = state.mutable_data_ptr<uint8_t>();
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  at::Generator for_kernel() {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t mixed = (seed_ * 0x9E3779B97F4A7C15ull) ^ ((offset_ + 1) * 0xBF58476D1CE4E5B9ull);
    offset_ += 4; // Philox hands out four numbers at a time
    return at::detail::createCPUGenerator(mixed);
  }
};
std::vector<at::Generator>& default_generators() {
  static auto& generators = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int device = 0; device < device_count(); device++) made->push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return generators;
}
int hand_out_default = -1; // torch.Generator() makes new ones only; Python asks for the default ones with this

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generators().at(index_or_current(device));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    if (hand_out_default >= 0) return default_generators().at(std::exchange(hand_out_default, -1));
    return at::make_generator<Generator>(index_or_current(device));
  }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock;
    auto* block = block_of(address);
    return Device(CUDA, block ? block->stream.first : current);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current;
    if (device >= 0) set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    host_waits("synchronize");
    complete_device(index_or_current(device));
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Event& of(void* event) { return *static_cast<Event*>(event); }
  DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    const auto before = current;
    setDevice(device);
    return Device(CUDA, before);
  }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream make(DeviceIndex device, StreamId id) const { return Stream(Stream::UNSAFE, Device(CUDA, device), id); }
  Stream getStream(Device device) const override {
    const auto index = index_or_current(device.index());
    return make(index, current_stream[index]);
  }
  Stream getDefaultStream(Device device) const override { return make(index_or_current(device.index()), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    return make(index_or_current(device.index()), next_stream++);
  }
  Stream exchangeStream(Stream stream) const override {
    return make(stream.device_index(), std::exchange(current_stream[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    fakecuda::record(of(*event), key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) fakecuda::block(of(event), key_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || query(of(event)); }
  void synchronizeEvent(void* event) const override {
    host_waits("Event.synchronize");
    if (event) complete(of(event).clock);
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock;
    const auto& state = streams[key_of(stream)];
    const bool done = state.copies.empty() && state.deliveries.empty();
    complete_stream(key_of(stream));
    return done; // not done when it is asked first, see query()
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("Stream.synchronize");
    complete_stream(key_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_waits("synchronize");
    complete_device(index_or_current(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(of(second).at - of(first).at).count();
  }
};

// ---- One memory, two tensors: a kernel of the CPU sees device memory through an alias that keeps it alive.
const c10::DispatchKeySet cpu_keys(c10::DispatchKey::CPU), cuda_keys(c10::DispatchKey::CUDA);
const auto host_keys_off = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

c10::Storage alias_on(const c10::Storage& storage, Device device) {
  auto* owner = new c10::Storage(storage);
  c10::DataPtr data(const_cast<void*>(storage.data()), owner, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device);
  auto* allocator = device.is_cpu() ? c10::GetCPUAllocator() : static_cast<c10::Allocator*>(&device_memory);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}
Tensor like(const Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys) {
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}
bool is_cuda(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }
Tensor on_cpu(const Tensor& tensor) { return like(tensor, alias_on(tensor.storage(), DeviceType::CPU), cpu_keys); }
// The same without keeping the memory alive, for work that waits in a stream, as on a GPU.
Tensor borrowed(const Tensor& tensor) {
  auto* data = const_cast<void*>(tensor.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(data, DeviceType::CPU), nullptr, false);
  return like(tensor, std::move(storage), cpu_keys);
}
// Copies run wherever the program waits: within autocast, inference mode or a dispatch mode that is not theirs.
void copy_on_host(const Tensor& to, const Tensor& from) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      host_keys_off | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  InKernel host_memory(-1);
  at::NoGradGuard no_grad;
  to.copy_(from);
}

// Operators whose result has a size, or is a value, that only the device knows: the host waits for it.
const std::set<std::string> waiting = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::repeat_interleave", "aten::bincount"};
// Operators that take indices from the host, and copy them while the host waits.
const std::set<std::string> host_indices = {"aten::index", "aten::_index_put_impl_", "aten::index_put_"};

// Replace each tensor of a value, however it is nested.
template <typename Replace>
void replace_tensors(c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    value = list;
  } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<Tensor>> lists;
    for (const auto& inner : value.toListRef()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : inner.toTensorVector()) list.push_back(replace(tensor));
      lists.push_back(list);
    }
    value = lists;
  }
}
bool has_mask(const c10::IValue& indices) {
  if (!indices.isOptionalTensorList()) return false;
  const auto list = indices.toOptionalTensorVector();
  return std::any_of(list.begin(), list.end(), [](const std::optional<Tensor>& index) {
    return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  });
}

// Every operator without a kernel below: run the kernel of the CPU on aliases, and hand out what it makes as
// tensors of the device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  const std::vector<c10::IValue> originals(stack->begin() + begin, stack->end());
  const bool collective = name.rfind("c10d::", 0) == 0;
  Device device(CUDA, current);
  bool seen = false, host_tensor = false;
  std::unordered_map<c10::StorageImpl*, c10::Storage> alias_of, original_of;
  std::vector<std::pair<Tensor, Tensor>> written; // tensor, its alias
  std::vector<std::pair<const void*, bool>> accesses; // address, whether it is written
  const auto two_devices = [&](Device other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", other, "! (", name, ")");
  };
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    const bool writes = info && info->isWrite();
    replace_tensors(value, [&](const Tensor& tensor) -> Tensor {
      if (!tensor.defined()) return tensor;
      if (!is_cuda(tensor)) {
        host_tensor |= tensor.device().is_cpu() && (tensor.dim() > 0 || collective);
        return tensor;
      }
      if (!std::exchange(seen, true)) device = tensor.device();
      if (tensor.device() != device) two_devices(tensor.device());
      TORCH_CHECK(tensor.layout() == at::kStrided, "the fake device has strided tensors only (", name, ")");
      auto* key = tensor.storage().unsafeGetStorageImpl();
      auto found = alias_of.find(key);
      if (found == alias_of.end()) {
        found = alias_of.emplace(key, alias_on(tensor.storage(), DeviceType::CPU)).first;
        original_of.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
      }
      auto alias = like(tensor, found->second, cpu_keys);
      if (writes) written.emplace_back(tensor, alias);
      accesses.emplace_back(tensor.storage().data(), writes);
      return alias;
    });
    if (value.isDevice() && value.toDevice().type() == CUDA) {
      if (value.toDevice().has_index()) device = value.toDevice();
      value = Device(DeviceType::CPU);
    }
  }
  for (size_t i = 0; i < count; i++) {
    if (schema.arguments()[i].name() != "generator") continue;
    auto& value = (*stack)[begin + i];
    at::Generator generator = value.isNone() ? default_generators().at(device.index()) : value.toGenerator();
    TORCH_CHECK(generator.device().type() == CUDA, "Expected a 'cuda' device type for generator but found 'cpu'");
    value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->for_kernel();
  }
  if (seen && host_tensor) {
    if (!host_indices.count(name)) two_devices(DeviceType::CPU);
    host_waits("copy of indices from the host");
  }
  if (waiting.count(name) || (host_indices.count(name) && has_mask((*stack)[begin + 1]))) {
    host_waits(name.c_str());
    complete_stream(stream_of(device.index()));
  }
  {
    Lock lock;
    const auto key = stream_of(device.index());
    const auto position = next_position(key);
    advance(key, position);
    for (const auto& [address, writes] : accesses) touch(address, key, position, writes, name);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard guard(host_keys_off);
    // Gloo stands behind a group of the backend "nccl", hidden under a device type that nothing else uses: the
    // host's tensors have no backend in such a group, and are refused.
    InKernel memory(collective ? -1 : device.index());
    op.callBoxedForDispatchKey(collective ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU, *stack);
  }
  std::vector<const void*> made;
  const auto to_device = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = original_of.find(key);
    if (found == original_of.end()) {
      found = original_of.emplace(key, alias_on(tensor.storage(), device)).first;
      made.push_back(tensor.storage().data());
    }
    return like(tensor, found->second, cuda_keys);
  };
  for (auto& [tensor, alias] : written) { // an out= tensor that was resized
    const bool moved = alias.storage().data() != tensor.storage().data();
    if (!moved && alias.sizes() == tensor.sizes() && alias.strides() == tensor.strides()) continue;
    auto* impl = tensor.unsafeGetTensorImpl();
    if (moved) {
      impl->set_storage_keep_dtype(alias_on(alias.storage(), device));
      made.push_back(alias.storage().data());
    }
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  const auto returns = schema.returns().size(), first = stack->size() - returns;
  for (size_t i = 0; i < returns; i++) {
    auto& value = (*stack)[first + i];
    const auto* info = schema.returns()[i].alias_info();
    bool given = false; // an operator that writes to an argument returns that argument
    for (size_t j = 0; info && info->isWrite() && j < count && !given; j++) {
      const auto* argument = schema.arguments()[j].alias_info();
      given = argument && *argument == *info && originals[j].isTensor();
      if (given) value = originals[j];
    }
    if (!given) replace_tensors(value, to_device);
  }
  Lock lock;
  const auto key = stream_of(device.index());
  for (const auto* address : made) touch(address, key, streams[key].issued, true, name);
}

// ---- Kernels of their own: making tensors, views, copies
struct OnDevice {
  DeviceIndex before = current;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->has_index()) set_device(device->index());
  }
  ~OnDevice() { current = before; }
};
Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, cuda_keys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, cuda_keys, c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& tensor, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
Tensor view(const Tensor& tensor, Sizes size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor& set_storage(Tensor& tensor, c10::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_source(Tensor& tensor, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, count, {});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return at::native::set_storage_cpu_(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
Tensor& set_empty(Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_memory.on(tensor.device().index(), 0), &device_memory, true);
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {0}, {});
}
const Tensor& resize(const Tensor& tensor, Sizes size, std::optional<at::MemoryFormat> format) {
  OnDevice guard(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}
// FSDP frees and takes storages: `UntypedStorage.resize_` comes here.
void resize_storage(Tensor& tensor, int64_t bytes) {
  OnDevice guard(tensor.device());
  advance(stream_of(current));
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}
void note(const Tensor& tensor, const Key& key, uint64_t position, bool writes, const char* name) {
  touch(tensor.storage().data(), key, position, writes, name);
}
at::Scalar scalar(const Tensor& tensor) {
  host_waits("item");
  const auto key = stream_of(tensor.device().index());
  {
    Lock lock;
    note(tensor, key, next_position(key), false, "item");
    complete_stream(key);
  }
  return at::native::_local_scalar_dense_cpu(on_cpu(tensor));
}
void record_stream(Tensor& tensor, Stream stream) { device_memory.recordStream(tensor.storage().data_ptr(), stream); }
std::tuple<Tensor, Tensor> dropout(const Tensor& tensor, double p, std::optional<bool> train) {
  const auto bools = tensor.options().dtype(at::kBool);
  if (!train.value_or(true)) return {tensor.clone(), at::ones_like(tensor, bools)};
  auto mask = at::empty_like(tensor, bools).bernoulli_(1 - p);
  return {tensor * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
int64_t choose_sdpa(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

void copy_between_devices(const Tensor& to, const Tensor& from) {
  // The stream of each device waits for the other's before and after.
  Lock lock;
  const auto source = stream_of(from.device().index()), target = stream_of(to.device().index());
  const auto position = next_position(source), arrival = next_position(target);
  advance(source);
  advance(target);
  merge(streams[source].known, streams[target].known);
  streams[source].known[target] = arrival;
  merge(streams[target].known, streams[source].known);
  streams[target].known[source] = position;
  note(from, source, position, false, "copy");
  note(to, target, arrival, true, "copy");
  copy_on_host(on_cpu(to), on_cpu(from));
}
void copy_to_host(const Tensor& to, const Tensor& from, const Key& key, bool non_blocking) {
  const bool late = non_blocking && is_pinned(to.const_data_ptr());
  if (!late) host_waits(non_blocking ? "copy to pageable memory, non_blocking without effect" : "copy to the host");
  Lock lock;
  const auto position = next_position(key);
  note(from, key, position, false, "copy to the host");
  if (!late) {
    complete_stream(key);
    return copy_on_host(to, on_cpu(from));
  }
  const Tensor source = borrowed(from), target = like(to, to.storage(), cpu_keys);
  enqueue(key, position, [source, target, key, position] {
    const Tensor taken = at::detail::empty_strided_cpu(target.sizes(), target.strides(), target.scalar_type());
    copy_on_host(taken, source);
    auto* begin = static_cast<char*>(const_cast<void*>(target.storage().data()));
    auto deliver = [taken, target] { copy_on_host(target, taken); };
    streams[key].deliveries.push_back({position, begin, begin + target.storage().nbytes(), std::move(deliver)});
  });
}
void copy_to_device(const Tensor& to, const Tensor& from, const Key& key, bool non_blocking) {
  const bool scalar = from.dim() == 0, late = !scalar && non_blocking && is_pinned(from.const_data_ptr());
  // A copy from pageable memory goes through a buffer of the driver, which the host fills, and may wait for.
  if (!late && !(scalar && non_blocking))
    host_waits(scalar ? "copy of a host scalar" : non_blocking ? "copy from pageable memory, non_blocking without effect" : "copy from the host");
  Lock lock;
  const auto position = next_position(key);
  note(to, key, position, true, "copy to the device");
  if (!late) {
    advance(key);
    return copy_on_host(on_cpu(to), from);
  }
  const Tensor target = borrowed(to), source = like(from, from.storage(), cpu_keys);
  enqueue(key, position, [source, target, key] {
    deliver_for(key, source.storage().data(), source.storage().nbytes());
    copy_on_host(target, source);
  });
}
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.defined() || to.unsafeGetTensorImpl() == from.unsafeGetTensorImpl()) return to;
  const bool down = !is_cuda(to), up = !is_cuda(from);
  TORCH_CHECK(!(down && !to.device().is_cpu()) && !(up && !from.device().is_cpu()), "copy between ", from.device(), " and ", to.device());
  c10::impl::ExcludeDispatchKeyGuard guard(host_keys_off);
  const Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  const auto key = stream_of((down ? from : to).device().index());
  if (down) {
    copy_to_host(to, source, key, non_blocking);
  } else if (up) {
    copy_to_device(to, source, key, non_blocking);
  } else if (to.device() != from.device()) {
    copy_between_devices(to, source);
  } else {
    Lock lock;
    const auto position = next_position(key);
    advance(key);
    note(source, key, position, false, "copy");
    note(to, key, position, true, "copy");
    copy_on_host(on_cpu(to), on_cpu(source));
  }
  return to;
}
} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", scalar);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("native_dropout", dropout);
}
TORCH_LIBRARY(fakecuda, m) { m.def("resize_storage(Tensor(a!) t, int n) -> ()"); }
TORCH_LIBRARY_IMPL(fakecuda, CUDA, m) { m.impl("resize_storage", resize_storage); }
// torch has kernels for these under CUDA, which hand the tensors on to the group; they are replaced.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const auto* name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
                           "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
                           "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "send", "recv_", "recv_any_source_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
static const bool registered = [] {
  c10::SetAllocator(CUDA, &device_memory);
  c10::SetCPUAllocator(&kernel_memory, 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_sdpa);
  return true;
}();

// ---- What Python asks for by ctypes
extern "C" {
void fakecuda_report(Report waits, Report races) {
  on_wait = waits;
  on_race = races;
}
void fakecuda_next_generator(int device) { hand_out_default = device; }
int fakecuda_host_register(uintptr_t address, size_t bytes) {
  Lock lock;
  return pinned.emplace(address, bytes).second ? 0 : 712; // cudaErrorHostMemoryAlreadyRegistered
}
int fakecuda_host_unregister(uintptr_t address) {
  Lock lock;
  return pinned.erase(address) ? 0 : 713; // cudaErrorHostMemoryNotRegistered
}
void fakecuda_set_current(int device) { current = device; }
int fakecuda_current() { return current; }
void fakecuda_set_limit(int device, int64_t bytes) {
  Lock lock;
  memory[device].limit = bytes;
}
int64_t fakecuda_limit(int device) {
  Lock lock;
  return memory[device].limit;
}
int64_t fakecuda_blocks(int device, int64_t* out, int64_t room) { return list_blocks(device, out, room); }
double fakecuda_elapsed(uintptr_t first, uintptr_t second) {
  return Guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
}
}
