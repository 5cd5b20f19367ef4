// Copies, and every operator: its shapes from the meta kernel at once, its values from the CPU kernel on the stream.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace virtual_device {
namespace {

// A copy arrives in this many parts, with the time that it takes between them.
constexpr std::size_t kParts = 4;

struct Link {
  std::atomic<double> latency{0}, bandwidth{0};
  std::atomic<std::int64_t> copied{0};
  std::mutex mutex;
  Barrier barrier; // of which copies come to `reached`, and go on when `opened` is over
};

std::array<Link, 2> links;

std::mutex delays_mutex;
std::unordered_map<std::string, double> delays;

double delay_of(const std::string& name) {
  const std::lock_guard<std::mutex> lock(delays_mutex);
  const auto own = delays.find(name);
  const auto found = own == delays.end() ? delays.find("") : own;
  return found == delays.end() ? 0 : found->second;
}

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The same bytes as the workers see them: a CPU tensor that owns nothing. So a block that is given back too early is
// handed out again under an operator that still reads it, as on a GPU.
at::Tensor as_workers_see(const at::Tensor& tensor) {
  const at::Tensor seen = at::from_blob(
      for_workers(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

c10::Device indexed(std::optional<c10::Device> device) {
  const int index = device.has_value() && device->has_index() ? device->index() : current_device();
  return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

Bytes bytes_of(const at::Tensor& tensor) {
  const auto start = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  if (tensor.numel() == 0) {
    return {start, start};
  }
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {start, start + static_cast<std::uintptr_t>(last + 1) * tensor.itemsize()};
}

// -- copies ---------------------------------------------------------------------------------------------------------

void carry(std::byte* to, const std::byte* from, std::size_t nbytes, Link& link) {
  Barrier barrier;
  {
    const std::lock_guard<std::mutex> lock(link.mutex);
    barrier = link.barrier;
  }
  if (barrier.opened) {
    barrier.reached->finish();
    barrier.opened->wait();
  }
  const double bandwidth = link.bandwidth;
  const double seconds = link.latency + (bandwidth > 0 ? static_cast<double>(nbytes) / bandwidth : 0);
  const std::size_t part = std::max<std::size_t>((nbytes + kParts - 1) / kParts, 1);
  for (std::size_t at = 0; at < nbytes; at += part) {
    pause(seconds / kParts);
    std::memcpy(to + at, from + at, std::min(part, nbytes - at));
  }
  link.copied += static_cast<std::int64_t>(nbytes);
}

// Enqueues a copy of flat bytes between a device and the host, and has the host wait where CUDA would.
void across(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool out = is_ours(from);
  const at::Tensor &ours = out ? from : to, &hosts = out ? to : from;
  const std::size_t nbytes = ours.nbytes();
  if (nbytes == 0) {
    return;
  }
  const int device = ours.device().index();
  const HostMemory kind = kind_of(hosts.data_ptr(), nbytes);
  const bool waits = !non_blocking || kind == HostMemory::kPageable;
  if (waits) {
    check_not_captured(
        device, static_cast<int>(current_stream(device).id()), "a copy that the host waits for");
    check_no_capture("a copy that the host waits for");
  }
  auto* device_bytes = static_cast<std::byte*>(for_workers(ours.data_ptr()));
  auto* host_bytes = static_cast<std::byte*>(hosts.data_ptr());
  std::byte *target = out ? host_bytes : device_bytes, *source = out ? device_bytes : host_bytes;
  Link& link = links[static_cast<int>(out ? Direction::kOut : Direction::kIn)];
  Worker& stream = current_worker(device);
  note("copy " + std::to_string(nbytes) + " on", device, static_cast<int>(current_stream(device).id()));
  stream.enqueue(
      {out ? Kind::kCopyOut : Kind::kCopyIn,
       "copy_",
       [=, &link](std::uint64_t) { carry(target, source, nbytes, link); },
       {},
       {bytes_of(from)},
       {bytes_of(to)}});
  if (kind == HostMemory::kPinned && !stream.is_captured()) {
    note_copy(host_bytes, stream.record());
  }
  if (waits) {
    stream.synchronize();
  }
}

bool same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.strides() == other.strides() && one.is_non_overlapping_and_dense() &&
      one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  const int here = from.device().index(), there = to.device().index();
  Worker &reads = current_worker(here), &owns = current_worker(there);
  if (here != there) {
    TORCH_CHECK_NOT_IMPLEMENTED(!captures(), "the virtual device captures no copy from one device to another");
    reads.wait_for(owns.record());
  }
  const auto run = [to = as_workers_see(to), from = as_workers_see(from), delay = delay_of("copy_")](std::uint64_t) {
    pause(delay);
    to.copy_(from);
  };
  reads.enqueue({Kind::kKernel, "copy_", run, {}, {bytes_of(from)}, {bytes_of(to)}});
  if (here != there) {
    owns.wait_for(reads.record());
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  const at::Tensor from = given.sizes() == self.sizes() ? given : given.expand_as(self);
  if (self.numel() == 0 || self.is_same(from)) {
    return self;
  }
  const c10::OptionalDeviceGuard guard(is_ours(self) ? self.device() : from.device());
  if (is_ours(self) && is_ours(from)) {
    copy_on_device(self, from);
  } else if (same_layout(self, from)) {
    across(self, from, non_blocking);
  } else if (is_ours(self)) { // what has another layout is put in order on the host, and spread out on the device
    const at::Tensor ordered = from.to(self.scalar_type()).resolve_conj().resolve_neg().contiguous();
    at::Tensor landed = at::empty(self.sizes(), self.options());
    across(landed, ordered, non_blocking && ordered.is_same(from));
    copy_on_device(self, landed);
  } else {
    at::Tensor ordered = at::empty(self.sizes(), from.options().dtype(self.dtype()));
    copy_on_device(ordered, from);
    if (self.is_contiguous() && !self.is_conj() && !self.is_neg()) {
      across(self, ordered, non_blocking);
    } else {
      const at::Tensor landed = at::empty(self.sizes(), self.options());
      across(landed, ordered, false);
      self.copy_(landed);
    }
  }
  return self;
}

// -- any operator ---------------------------------------------------------------------------------------------------

using Stack = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue changed(const c10::IValue& value, c10::Device device, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isDevice()) {
    return value.toDevice().type() == kType ? c10::IValue(device) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return list;
  }
  if (value.isList()) {
    const auto given = value.toList();
    c10::impl::GenericList list(given.elementType());
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(changed(element, device, change));
    }
    return list;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      for_each_tensor(element, see);
    }
  }
}

// One call of an operator.
class Call {
 public:
  // `op` is what computes the values; the arguments are the last ones of `stack`, which gets the results.
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.operator_name().name.substr(schema_.operator_name().name.rfind(':') + 1)),
        stack_(stack),
        arguments_(torch::jit::last(stack, schema_.arguments().size()).vec()),
        device_(find_device()) {}

  void run() {
    const c10::DeviceGuard guard(device_);
    std::vector<c10::IValue> results;
    if (!may_be_enqueued() || !enqueue(results)) {
      run_here(results);
    }
    torch::jit::drop(stack_, arguments_.size());
    std::move(results.begin(), results.end(), std::back_inserter(stack_));
  }

 private:
  c10::Device find_device() const {
    std::optional<c10::Device> found;
    for (const c10::IValue& argument : arguments_) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (is_ours(tensor)) {
          TORCH_CHECK(
              !found.has_value() || *found == tensor.device(), schema_.operator_name(),
              ": all tensors must be on one device, and there are ", *found, " and ", tensor.device());
          found = tensor.device();
        }
      });
    }
    for (const c10::IValue& argument : arguments_) {
      if (found.has_value() && !takes_host_tensors()) {
        for_each_tensor(argument, [&](const at::Tensor& tensor) {
          TORCH_CHECK(
              !tensor.defined() || is_ours(tensor) || tensor.dim() == 0, schema_.operator_name(),
              ": Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
              tensor.device());
        });
      }
      if (!found.has_value() && argument.isDevice() && argument.toDevice().type() == kType) {
        found = indexed(argument.toDevice());
      }
    }
    return found.value_or(indexed(std::nullopt));
  }

  // As on a GPU: indices, and the lengths of sequences, may be on the host.
  bool takes_host_tensors() const {
    static const std::unordered_set<std::string> names{
        "index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index", "_pack_padded_sequence"};
    return names.count(name_) != 0;
  }

  // Whether shapes say all that the host has to know, and a generator that takes part is an argument.
  bool may_be_enqueued() const {
    for (const c10::Argument& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      const bool tensors = kind == c10::TypeKind::TensorType ||
          (kind == c10::TypeKind::ListType && result.type()->expect<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
      if (!tensors) {
        return false;
      }
      TORCH_CHECK_NOT_IMPLEMENTED(
          result.alias_info() == nullptr || result.alias_info()->isWrite(), "the virtual device does not know the view ",
          schema_.operator_name());
    }
    return (!has(at::Tag::nondeterministic_seeded) || generator_argument().has_value()) && !depends_on_data();
  }

  std::optional<int> generator_argument() const {
    return schema_.argumentIndexWithName("generator");
  }

  bool depends_on_data() const {
    return has(at::Tag::data_dependent_output) || has(at::Tag::dynamic_output_shape);
  }

  bool has(at::Tag tag) const {
    const auto tags = op_.getTags();
    return std::find(tags.begin(), tags.end(), tag) != tags.end();
  }

  // The argument that result `index` is, where it is one that was written.
  std::optional<std::size_t> written_argument(std::size_t index) const {
    const auto* alias = schema_.returns()[index].alias_info();
    if (alias == nullptr) {
      return std::nullopt;
    }
    for (std::size_t at = 0; at < arguments_.size(); ++at) {
      const auto* other = schema_.arguments()[at].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        return at;
      }
    }
    return std::nullopt;
  }

  // Arguments as the workers take them. What is on the host is read now.
  Stack for_the_workers() const {
    Stack stack;
    for (const c10::IValue& argument : arguments_) {
      stack.push_back(changed(argument, c10::Device(c10::kCPU), [](const at::Tensor& tensor) {
        if (is_ours(tensor)) {
          return as_workers_see(tensor);
        }
        at::Tensor copy = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        return copy;
      }));
    }
    return stack;
  }

  // What the meta kernel makes of the arguments; nothing where there is none, or where it refuses.
  std::optional<Stack> shapes() const {
    if (schema_.returns().empty()) { // fused optimizers, which have no meta kernels
      return Stack();
    }
    static std::mutex mutex;
    static auto* without = new std::unordered_set<std::string>();
    const std::string name = toString(schema_.operator_name());
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (without->count(name) != 0) {
        return std::nullopt;
      }
    }
    std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
    Stack stack;
    for (const c10::IValue& argument : arguments_) {
      stack.push_back(changed(argument, c10::Device(c10::kMeta), [&](const at::Tensor& tensor) {
        if (!is_ours(tensor) && tensor.dim() == 0) {
          return tensor;
        }
        at::Tensor& meta = made[tensor.unsafeGetTensorImpl()];
        if (!meta.defined()) {
          meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false));
        }
        return meta;
      }));
    }
    if (const auto generator = generator_argument()) {
      stack[*generator] = c10::IValue(); // which is the CPU's
    }
    try {
      op_.callBoxed(stack);
    } catch (const c10::NotImplementedError&) {
      const std::lock_guard<std::mutex> lock(mutex);
      without->insert(name);
      return std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt; // the CPU kernel says what is wrong
    }
    if (name_ == "native_batch_norm" && !argument("training").toBool()) {
      for (const std::size_t statistics : {1, 2}) { // of the batch: the meta kernel has them in evaluation too
        stack[statistics] = stack[statistics].toTensor().new_empty({0});
      }
    }
    return stack;
  }

  const c10::IValue& argument(const char* name) const {
    return arguments_[*schema_.argumentIndexWithName(name)];
  }

  at::Tensor like(const at::Tensor& shape) const {
    return shape.defined() ? empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), device_) : shape;
  }

  // Makes the results, by their shapes, and enqueues the computation; false where the shapes are not known.
  bool enqueue(std::vector<c10::IValue>& results) {
    const auto shapes_found = shapes();
    if (!shapes_found.has_value()) {
      return false;
    }
    std::vector<std::pair<std::size_t, c10::IValue>> fresh; // by number of result: what the worker has to fill
    for (std::size_t index = 0; index < shapes_found->size(); ++index) {
      const c10::IValue& shape = (*shapes_found)[index];
      if (const auto argument = written_argument(index)) {
        resize(arguments_[*argument], shape);
        results.push_back(arguments_[*argument]);
      } else {
        results.push_back(changed(shape, device_, [this](const at::Tensor& tensor) { return like(tensor); }));
        fresh.emplace_back(index, changed(results.back(), device_, &as_workers_see));
      }
    }
    current_worker(device_.index()).enqueue(work(results, std::move(fresh)));
    return true;
  }

  Work work(const std::vector<c10::IValue>& results, std::vector<std::pair<std::size_t, c10::IValue>> fresh) const {
    const auto generator = generator_argument();
    Work work{Kind::kKernel, name_, {}};
    if (generator.has_value() && has(at::Tag::nondeterministic_seeded)) {
      const c10::IValue& given = arguments_[*generator];
      work.generator = given.isNone() ? at::detail::getDefaultCPUGenerator() : given.toGenerator();
    }
    work.run = [op = op_, arguments = for_the_workers(), fresh = std::move(fresh), delay = delay_of(name_),
                drawn = work.generator.has_value() ? generator : std::nullopt](std::uint64_t number) {
      pause(delay);
      Stack stack = arguments;
      if (drawn.has_value()) {
        stack[*drawn] = c10::IValue(at::detail::createCPUGenerator(number));
      }
      op.callBoxed(stack);
      for (const auto& [index, target] : fresh) {
        fill(target, stack[index]);
      }
    };
    if (current_worker(device_.index()).is_captured()) {
      note_bytes(results, work);
    }
    return work;
  }

  void note_bytes(const std::vector<c10::IValue>& results, Work& work) const {
    for (std::size_t index = 0; index < arguments_.size(); ++index) {
      const auto* alias = schema_.arguments()[index].alias_info();
      const bool writes = alias != nullptr && alias->isWrite(), reads = !schema_.arguments()[index].is_out();
      for_each_tensor(arguments_[index], [&](const at::Tensor& tensor) {
        if (is_ours(tensor) && reads) {
          work.reads.push_back(bytes_of(tensor));
        }
        if (is_ours(tensor) && writes) {
          work.writes.push_back(bytes_of(tensor));
        }
      });
    }
    for (std::size_t index = 0; index < results.size(); ++index) {
      if (!written_argument(index).has_value()) {
        for_each_tensor(results[index], [&](const at::Tensor& tensor) {
          if (is_ours(tensor)) {
            work.writes.push_back(bytes_of(tensor));
          }
        });
      }
    }
  }

  static void resize(const c10::IValue& given, const c10::IValue& shape) {
    if (given.isTensor() && given.toTensor().sizes() != shape.toTensor().sizes()) {
      at::native::resize_output(given.toTensor(), shape.toTensor().sizes());
    }
  }

  static void fill(const c10::IValue& target, const c10::IValue& value) {
    if (target.isTensor()) {
      if (target.toTensor().defined() && value.toTensor().defined()) {
        target.toTensor().copy_(value.toTensor());
      }
      return;
    }
    const auto targets = target.toTensorVector(), values = value.toTensorVector();
    for (std::size_t at = 0; at < targets.size(); ++at) {
      targets[at].copy_(values[at]);
    }
  }

  // Drains the stream, computes on the calling thread, and sends the results to the device.
  void run_here(std::vector<c10::IValue>& results) {
    Worker& stream = current_worker(device_.index());
    if (depends_on_data()) {
      check_not_captured(device_.index(), static_cast<int>(current_stream(device_.index()).id()), "to wait for data");
      check_no_capture("to wait for data");
    }
    // On a GPU the others would not wait.
    TORCH_CHECK_NOT_IMPLEMENTED(
        !stream.is_captured(), "the virtual device cannot capture ", schema_.operator_name(),
        ": it knows the result's shape, or the random numbers, only once it has run");
    stream.synchronize();
    Stack stack = for_the_workers();
    for (std::size_t at = 0; at < arguments_.size(); ++at) {
      if (schema_.arguments()[at].is_out() && stack[at].isTensor()) {
        stack[at] = stack[at].toTensor().clone(); // it may be resized
      }
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack);
    }
    for (std::size_t index = 0; index < stack.size(); ++index) {
      const auto argument = written_argument(index);
      if (argument.has_value()) {
        results.push_back(arguments_[*argument]);
        if (!schema_.arguments()[*argument].is_out()) {
          continue;
        }
        resize(results.back(), stack[index]);
      } else {
        results.push_back(changed(stack[index], device_, [this](const at::Tensor& tensor) { return like(tensor); }));
      }
      if (results.back().isTensor() || results.back().isTensorList()) {
        stream.enqueue(
            {Kind::kKernel, name_, [target = changed(results.back(), device_, &as_workers_see), value = stack[index]](
                                       std::uint64_t) { fill(target, value); }});
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack& stack_;
  const std::vector<c10::IValue> arguments_;
  const c10::Device device_;
};

void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, *stack).run();
}

const c10::OperatorHandle& operator_named(const char* name) {
  static std::mutex mutex;
  static auto* found = new std::unordered_map<std::string, c10::OperatorHandle>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = found->find(name);
  return at != found->end()
      ? at->second
      : found->emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

// A convolution on a device that torch does not know comes under other names.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  Call(operator_named("aten::convolution"), *stack).run();
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  // grad_output, input, weight, | bias_sizes, | stride, padding, dilation, transposed, output_padding, groups, mask
  constexpr std::size_t kArguments = 10, kBias = 3;
  const auto first = stack->end() - kArguments;
  const at::Tensor weight = (first + 2)->toTensor();
  const bool transposed = (first + 6)->toBool();
  const std::int64_t channels = transposed ? weight.size(1) * (first + 8)->toInt() : weight.size(0);
  stack->insert(first + kBias, c10::IValue(c10::List<std::int64_t>({channels})));
  Call(operator_named("aten::convolution_backward"), *stack).run();
}

// -- what makes tensors, and views ----------------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::OptionalDeviceGuard guard(indexed(device));
  return at::detail::empty_generic(
      sizes, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_with_strides(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  return empty_strided(sizes, strides, c10::dtype_or_default(dtype), indexed(device));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
  }
  const auto nbytes = static_cast<std::size_t>(impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->storage().nbytes() < nbytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), nbytes);
  }
  if (format.has_value()) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kType), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

void note_use(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream);
}

// As the CPU has it, by operators that take a generator.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::ones(input.sizes(), input.options().dtype(at::kBool))};
  }
  const double kept = 1 - p;
  at::Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  mask.bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1 / kept), mask};
}

std::int64_t attention_backend(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0; // the one that is made of other operators
}

} // namespace

void set_link(Direction direction, double latency, double bandwidth) {
  links[static_cast<int>(direction)].latency = latency;
  links[static_cast<int>(direction)].bandwidth = bandwidth;
}

Barrier hold_link(Direction direction) {
  Link& link = links[static_cast<int>(direction)];
  const std::lock_guard<std::mutex> lock(link.mutex);
  return link.barrier = {std::make_shared<Point>(), std::make_shared<Point>()};
}

void set_delay(const std::string& name, double seconds) {
  const std::lock_guard<std::mutex> lock(delays_mutex);
  delays[name] = seconds;
}

void clear_delays() {
  const std::lock_guard<std::mutex> lock(delays_mutex);
  delays.clear();
}

std::pair<std::int64_t, std::int64_t> copied_bytes() {
  return {links[0].copied.load(), links[1].copied.load()};
}

} // namespace virtual_device

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&virtual_device::any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &virtual_device::empty);
  m.impl("empty_strided", &virtual_device::empty_with_strides);
  m.impl("copy_", &virtual_device::copy_);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &virtual_device::resize);
  m.impl("set_", &virtual_device::set_nothing);
  m.impl("set_.source_Storage", &virtual_device::set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &virtual_device::set_tensor);
  m.impl("record_stream", &virtual_device::note_use);
  m.impl("native_dropout", &virtual_device::dropout);
  m.impl("_fused_sdp_choice", &virtual_device::attention_backend);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&virtual_device::convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&virtual_device::convolution_backward>());
}
