#include "operator_info.h"

#include <c10/core/DefaultDtype.h>

#include <mutex>

namespace simdev {
namespace {

using c10::IValue;

constexpr size_t kMostMemos = 8192;

struct Tables {
  std::mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, std::shared_ptr<const OperatorInfo>> infos;
  std::unordered_map<std::string, std::shared_ptr<const MetaResult>> memos;
};

class ForgetDeregistered final : public c10::OpRegistrationListener {
 public:
  explicit ForgetDeregistered(Tables& tables) : tables_(tables) {}
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::lock_guard lock(tables_.mutex);
    tables_.infos.erase(&op.schema());
    tables_.memos.clear();
  }

 private:
  Tables& tables_;
};

Tables& tables() {
  static Tables* all = [] {
    auto* t = new Tables();
    // Listens for the life of the process.
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(
        std::make_unique<ForgetDeregistered>(*t)));
    return t;
  }();
  return *all;
}

std::shared_ptr<const OperatorInfo> inspect(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  auto info = std::make_shared<OperatorInfo>();
  info->name = intern(schema.name());
  info->data_dependent =
      op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  info->pointwise = op.hasTag(at::Tag::pointwise);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    info->written.push_back(written);
    if (argument.name() == "generator") info->generator = i;
    if (written && argument.kwarg_only()) info->has_out = true;
  }
  for (const auto& result : schema.returns()) {
    int argument = -1;
    if (result.alias_info() && result.alias_info()->isWrite())
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets())
          argument = static_cast<int>(i);
      }
    if (argument < 0) info->all_in_place = false;
    info->aliased_argument.push_back(argument);
  }
  return info;
}

class KeyWriter {
 public:
  explicit KeyWriter(bool values) : values_(values) { key_.reserve(192); }

  template <class T>
  void put(const T& value) {
    key_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void tag(char c) { key_.push_back(c); }

  bool put_value(const IValue& value) {
    if (value.isNone()) return tag('n'), true;
    if (value.isTensor()) return put_tensor(value.toTensor()), true;
    if (value.isInt()) return tag('i'), values_ ? put(value.toInt()) : void(), true;
    if (value.isDouble()) return tag('d'), values_ ? put(value.toDouble()) : void(), true;
    if (value.isBool()) return tag(value.toBool() ? 'T' : 'F'), true;
    if (value.isDevice()) return tag('D'), true;
    if (value.isGenerator()) return tag('g'), true;
    if (value.isString()) {
      tag('s');
      put(value.toStringRef().size());
      key_.append(value.toStringRef());
      return true;
    }
    if (!value.isList()) return false;
    const auto list = value.toListRef();
    tag('[');
    put(list.size());
    for (const IValue& element : list)
      if (!put_value(element)) return false;
    return true;
  }

  std::string take() { return std::move(key_); }

 private:
  void put_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return tag('u');
    tag('t');
    tag(static_cast<char>(tensor.scalar_type()));
    tag(static_cast<char>(tensor.unsafeGetTensorImpl()->is_wrapped_number() |
                          tensor.is_conj() << 1 | tensor.is_neg() << 2 |
                          tensor.device().is_cpu() << 3));
    put(tensor.dim());
    for (int64_t size : tensor.sizes()) put(size);
    for (int64_t stride : tensor.strides()) put(stride);
  }

  bool values_;
  std::string key_;
};

}  // namespace

std::shared_ptr<const OperatorInfo> info_of(const c10::OperatorHandle& op) {
  Tables& all = tables();
  {
    const std::lock_guard lock(all.mutex);
    if (auto found = all.infos.find(&op.schema()); found != all.infos.end()) return found->second;
  }
  auto info = inspect(op);
  const std::lock_guard lock(all.mutex);
  return all.infos.emplace(&op.schema(), std::move(info)).first->second;
}

std::optional<std::string> memo_key(const c10::OperatorHandle& op, const OperatorInfo& info,
                                    const Stack& stack, size_t base) {
  KeyWriter writer(!info.pointwise);
  writer.put(&op.schema());
  writer.put(c10::get_default_dtype_as_scalartype());
  for (size_t i = base; i < stack.size(); ++i)
    if (!writer.put_value(stack[i])) return std::nullopt;
  return writer.take();
}

std::shared_ptr<const MetaResult> recall(const std::string& key) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  auto found = all.memos.find(key);
  return found == all.memos.end() ? nullptr : found->second;
}

void memorise(const std::string& key, std::shared_ptr<const MetaResult> result) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  if (all.memos.size() >= kMostMemos) all.memos.clear();
  all.memos.emplace(key, std::move(result));
}

size_t memo_size() {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  return all.memos.size();
}

}  // namespace simdev
