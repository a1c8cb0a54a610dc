// The pair of hooks by which autograd calls in, and the handle that it holds in between. A call
// must cost no more than 100 ns, so they are of Python's C interface: pybind11 looks instances up
// in a registry when it makes and drops them and casts each argument, which together takes longer
// than what a handle does. What is rare stands in python/memswap/engine, whose class of scopes is
// derived from this one.
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <vector>

#include "bind.h"
#include "engine/batch.h"
#include "engine/engine.h"
#include "engine/operator_log.h"
#include "storage/in_flight.h"

namespace memswap {

namespace {

// Runs a body that returns what a function of Python's C interface returns: nullptr with an
// exception set where it fails.
template <class Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();  // as for every function of this module
  }
  return nullptr;
}

// The new reference that a call of Python's C interface returned, or the exception that it set.
py::object owned(PyObject* result) {
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

// --- Handle: what pack returns to autograd, and unpack makes a tensor of again ---

struct HandleObject {
  PyObject_HEAD SavedTensor saved;
  PyObject* owner;   // the engine's object, or None
  PyObject* batch;   // of a group, or None
  PyObject* passed;  // what stands for the tensor since other hooks were given it, or nullptr
};

PyTypeObject* handle_type = nullptr;  // set once, by bind_handle

HandleObject* handle_of(PyObject* self) { return reinterpret_cast<HandleObject*>(self); }

PyObject* unpack(PyObject* object, PyObject*) {
  return guarded([&] {
    const auto alive = py::reinterpret_borrow<py::object>(object);  // whatever other threads drop
    const HandleObject* const self = handle_of(object);
    if (self->passed != nullptr) {
      return py::handle(self->passed).attr("unpack")().release().ptr();
    }
    if (self->batch != Py_None) {
      py::handle(self->batch).cast<Batch&>().notice_demand(self->saved.entry());
    }
    const at::Tensor tensor = self->saved.unpack();
    self->saved.tell();
    return THPVariable_Wrap(tensor);
  });
}

// The unpack hook of every engine: a handle of another kind says itself what it stands for.
PyObject* unpack_any(PyObject*, PyObject* handle) {
  if (Py_IS_TYPE(handle, handle_type)) {
    return unpack(handle, nullptr);
  }
  return guarded([&] { return py::handle(handle).attr("unpack")().release().ptr(); });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(handle_of(self)->owner);
  Py_VISIT(handle_of(self)->batch);
  Py_VISIT(handle_of(self)->passed);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

// The entry may die here, and let go of the GIL: nobody finds the handle any more, and a pending
// exception is not its own. Its engine's object outlives it.
void dealloc(PyObject* object) {
  HandleObject* const self = handle_of(object);
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  {
    const py::error_scope pending;
    std::destroy_at(&self->saved);
    Py_CLEAR(self->passed);
    Py_CLEAR(self->batch);
    Py_CLEAR(self->owner);
  }
  type->tp_free(object);
  Py_DECREF(type);
}

template <auto property>
PyObject* get(PyObject* self, void*) {
  return guarded([&] { return py::cast((handle_of(self)->saved.*property)()).release().ptr(); });
}

PyMethodDef methods[] = {{"unpack", unpack, METH_NOARGS, nullptr}, {}};
PyMethodDef functions[] = {{"unpack", unpack_any, METH_O, nullptr}, {}};

PyGetSetDef properties[] = {
    {"entry", get<&SavedTensor::known>, nullptr, nullptr, nullptr},
    {"view", get<&SavedTensor::view>, nullptr, nullptr, nullptr},
    {"stays", get<&SavedTensor::stays>, nullptr, nullptr, nullptr},
    {"tensor", get<&SavedTensor::tensor>, nullptr, nullptr, nullptr},
    {},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Handle",
    .basicsize = sizeof(HandleObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

// A handle of what `make` returns, made where it stays; it does not throw. `owner`: the engine's
// object in Python, which lives as long as the handle. `batch`: of a group, or None; it hears of
// each unpack. Both are borrowed.
template <class Make>
py::object new_handle(PyObject* owner, PyObject* batch, Make make) {
  py::object made = owned(handle_type->tp_alloc(handle_type, 0));
  HandleObject* const self = handle_of(made.ptr());
  self->owner = Py_NewRef(owner);
  self->batch = Py_NewRef(batch);
  new (&self->saved) SavedTensor(make());
  return made;
}

// The handle of a tensor that stays, and that was saved with this version. Leaves that require grad
// (weights, most of all) and parameters of Python's own classes of tensors are kept themselves.
py::object kept_handle(PyObject* object, uint32_t version, KnownPtr known, PyObject* owner) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  at::Tensor kept;
  if (Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    kept = without_graph(tensor);
  } else if (tensor.requires_grad() && tensor.is_leaf()) {
    kept = tensor;
  } else {
    kept = from("memswap.engine.autograd", "as_kept")(py::handle(object)).cast<at::Tensor>();
  }
  return new_handle(owner, Py_None,
                    [&] { return SavedTensor::kept(std::move(kept), version, std::move(known)); });
}

void bind_handle(py::module_& module) {
  py::object type = owned(PyType_FromModuleAndSpec(module.ptr(), &spec, nullptr));
  handle_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  module.add_object("Handle", type);
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
  module.def("kept_handle", [](const at::Tensor& tensor) {
    const auto version = static_cast<uint32_t>(tensor._version());
    return kept_handle(py::cast(tensor).ptr(), version, nullptr, Py_None);
  });
  module.def("raise_inplace_edit",
             [](const std::string& tensor, uint32_t found, uint32_t expected) {
               throw EditedInPlace(tensor, found, expected);
             });
}

// --- HookScope: one installation of an engine's hooks ---

// One that Python calls, and what it holds of Python's.
struct Scope : HookScope {
  explicit Scope(EnginePtr made) : engine(std::move(made)), owner(py::cast(engine)) {}

  Batch* batch_or_null() const { return batch.is_none() ? nullptr : &batch.cast<Batch&>(); }

  const EnginePtr engine;
  py::object owner;               // the engine's object
  bool pushed = false;            // its hooks are installed
  py::object outer = py::none();  // the hooks that were installed before, or None
  py::object batch = py::none();  // of a group, that saves here, or None
  // Saved once its operator has run. Nobody else may have the handle any more by then.
  struct Waiting {
    py::object handle, tensor;
    SavedView view;
  };
  std::vector<Waiting> waiting;
  uint64_t node = 0;  // of autograd, whose saving `waiting` waits for
};

// Without looking the type up: every scope holds its Scope in the same place. nullptr: it is being
// made. The collector knows an instance before pybind11 has given it any place: with the first one
// of a class of Python's it makes objects of its own, and each may set the collector off.
Scope* scope_in(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  if (!instance->simple_layout && instance->nonsimple.status == nullptr) {
    return nullptr;
  }
  auto place = instance->get_value_and_holder();
  return place.holder_constructed() ? static_cast<Scope*>(place.value_ptr()) : nullptr;
}

// Whether the tensor, or the one that it is a view of, has a class of its own, as a Parameter has.
bool is_of_subclass(PyObject* object, const at::Tensor& tensor) {
  const auto plain = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (!tensor.is_view()) {
    return !Py_IS_TYPE(object, plain);
  }
  const auto base = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor._base()));
  return !Py_IS_TYPE(base.ptr(), plain);
}

// Whether a tensor waits ([Note: What an operator fills after it was saved]). A small one stays,
// filled or not, unless other hooks are given it.
constexpr Py_ssize_t kTorchsReferences = 2;  // the native tensor's and the caller's
bool has_to_wait(const Scope& scope, PyObject* tensor, const SavedView& view) {
  return scope.pushed && Py_REFCNT(tensor) <= kTorchsReferences && view.may_be_filled_yet() &&
         (!scope.outer.is_none() || !scope.engine->is_small(view));
}

// The handle of a plain tensor. The lock is held, but not while the user's function is asked.
py::object save(Scope& scope, PyObject* tensor, SavedView&& view) {
  SaveResult saved = scope.engine->save(
      {THPVariable_Unpack(tensor), view, scope, scope.packs, scope.batch_or_null()});
  if (!saved.moves) {
    return kept_handle(tensor, view.version(), std::move(saved.known), scope.owner.ptr());
  }
  EntryPtr entry = as_entry(std::move(saved.known));
  return new_handle(scope.owner.ptr(), scope.batch.ptr(),
                    [&] { return SavedTensor::moved(std::move(entry), std::move(view)); });
}

// Hands a tensor that stays to the outer hooks, if there are any.
py::object or_outer(py::handle self, const Scope& scope, py::handle tensor, py::object handle) {
  return scope.outer.is_none() ? handle : self.attr("or_outer")(tensor, handle);
}

// The operators of the tensors that wait have run: they are saved.
void pack_waiting(py::handle self, Scope& scope) {
  for (Scope::Waiting& one : std::exchange(scope.waiting, {})) {
    if (Py_REFCNT(one.handle.ptr()) == 1) {
      continue;  // autograd has let it go
    }
    py::object saved;
    {
      const Locked locked(scope.engine->lock);
      saved = save(scope, one.tensor.ptr(), std::move(one.view));
    }
    saved = or_outer(self, scope, one.tensor, std::move(saved));
    HandleObject& handle = *handle_of(one.handle.ptr());
    if (Py_IS_TYPE(saved.ptr(), handle_type)) {
      std::swap(handle.saved, handle_of(saved.ptr())->saved);
      std::swap(handle.batch, handle_of(saved.ptr())->batch);
    } else {
      handle.passed = saved.release().ptr();
      handle.saved = SavedTensor::kept({}, 0, nullptr);
    }
  }
}

py::object pack_plain(py::handle self, Scope& scope, py::handle object, SavedView&& view) {
  Engine& engine = *scope.engine;
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  // A frozen parameter that nobody has named is known by its class.
  const bool persists = engine.persists(view) || (is_of_subclass(object.ptr(), tensor) &&
                                                  self.attr("is_frozen")(object).cast<bool>());
  const Locked locked(engine.lock);
  engine.ledger.counters.offer(static_cast<int64_t>(view.nbytes()));
  if (const Reason reason = persists ? reasons::kParameter : why_fixed(view)) {
    engine.keep(view, reason);
    return kept_handle(object.ptr(), view.version(), nullptr, scope.owner.ptr());
  }
  if (has_to_wait(scope, object.ptr(), view)) {
    py::object later = kept_handle(object.ptr(), view.version(), nullptr, scope.owner.ptr());
    scope.waiting.push_back({later, py::reinterpret_borrow<py::object>(object), std::move(view)});
    scope.node = at::sequence_number::peek();
    return later;
  }
  return save(scope, object.ptr(), std::move(view));
}

// The pack hook. For want of memory or support it only warns, and the tensor stays.
PyObject* pack(PyObject* object, PyObject* tensor) {
  return guarded([&] {
    if (!THPVariable_Check(tensor)) {
      throw py::type_error("pack needs a torch.Tensor");
    }
    const py::handle self(object);
    Scope& scope = *scope_in(object);
    if (!scope.waiting.empty() && scope.node != at::sequence_number::peek()) {
      pack_waiting(self, scope);
    }
    ++scope.packs;
    std::optional<SavedView> view = SavedView::capture(THPVariable_Unpack(tensor));
    if (!view) {
      return self.attr("pack_unusual")(py::handle(tensor)).release().ptr();
    }
    if (scope.action != Action::kKeep) {  // whoever uses what stays waits by itself
      wait_for_collectives(THPVariable_Unpack(tensor));
    }
    py::object handle = pack_plain(self, scope, tensor, std::move(*view));
    const bool waits = !scope.waiting.empty() && scope.waiting.back().handle.is(handle);
    scope.engine->tell();
    if (!waits) {
      handle = or_outer(self, scope, tensor, std::move(handle));
    }
    return handle.release().ptr();
  });
}

PyMethodDef pack_method = {"pack", pack, METH_O, nullptr};

// Python's collector sees what a scope holds of Python's. The engine stays: it is called without
// asking whether it is there.
void collect(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (const Scope* const scope = scope_in(self)) {
      for (const auto* held : {&scope->owner, &scope->outer, &scope->batch}) {
        Py_VISIT(held->ptr());
      }
      for (const Scope::Waiting& one : scope->waiting) {
        Py_VISIT(one.handle.ptr());
        Py_VISIT(one.tensor.ptr());
      }
    }
    return 0;
  };
  type.tp_clear = [](PyObject* self) {
    if (Scope* const scope = scope_in(self)) {
      scope->outer = scope->batch = py::none();
      std::exchange(scope->waiting, {}).clear();
    }
    return 0;
  };
}

}  // namespace

void bind_hooks(py::module_& module) {
  bind_handle(module);
  Bound<Scope> scope(module, "HookScope", py::custom_type_setup(collect));
  scope
      .writes<&Scope::unit, &Scope::action, &Scope::why_kept, &Scope::group, &Scope::ordinal,
              &Scope::covered, &Scope::pushed, &Scope::outer, &Scope::batch>()
      .def_readonly("engine", &Scope::owner)
      .def(py::init<EnginePtr>(), "engine"_a.none(false))
      .def("pack_waiting",
           [](const py::object& self) { pack_waiting(self, *scope_in(self.ptr())); });
  scope.attr("pack") =
      owned(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(scope.ptr()), &pack_method));
  module.def("observed", &OperatorLog::others_listen);
}

}  // namespace memswap
