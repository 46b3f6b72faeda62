// The tensors of one row of Adam, on whatever device: checked against each other, nothing owned.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>

#include "bindings/dlpack.h"
#include "bindings/layout.h"
#include "kernels/adam_variant.h"

namespace bucketwheel {

namespace py = pybind11;

struct AdamTensors {
  // The Python objects; vmax, master and remainder may be None.
  struct Objects {
    py::handle p, m, v, vmax, master, remainder;
  };

  dlpack::Described p, m, v;
  std::optional<dlpack::Described> vmax, master, remainder;

  static AdamTensors describe(const Objects& objects, int64_t index) {
    using namespace dlpack;
    AdamTensors out{describe_on_any_device(objects.p, {"params", index}),
                    describe_on_any_device(objects.m, {"exp_avgs", index}),
                    describe_on_any_device(objects.v, {"exp_avg_sqs", index}),
                    optional(objects.vmax, {"max_exp_avg_sqs", index}),
                    optional(objects.master, {"master_params", index}),
                    optional(objects.remainder, {"remainders", index})};
    expect_float(out.p, {"params", index});
    expect_dense(out.p, {"params", index});
    out.expect_states(index);
    out.expect_weight(index);
    for (const Part& part : out.parts(nullptr)) {
      if (part.tensor != nullptr) {
        expect_same_device(*part.tensor, {part.list, index}, out.p, {"params", index});
        expect_same_layout(*part.tensor, {part.list, index}, out.p, {"params", index});
      }
    }
    return out;
  }

  AdamRow row(int32_t group, uint32_t param, int64_t param_begin) const {
    AdamRow out;
    out.p = p.data;
    out.m = m.data;
    out.v = v.data;
    out.vmax = vmax ? vmax->data : nullptr;
    out.master = master ? master->data : remainder ? remainder->data : nullptr;
    out.numel = p.numel;
    out.param_begin = param_begin;
    out.param = param;
    out.group = group;
    out.p_dtype = p.dtype;
    out.g_dtype = default_grad_dtype();
    out.state_dtype = m.dtype;
    out.weight = master ? AdamWeight::kMaster : remainder ? AdamWeight::kRemainder : AdamWeight::kParam;
    return out;
  }

  // Of a row that has no gradient yet.
  DType default_grad_dtype() const { return p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

  dlpack::Described grad(py::handle g, int64_t index) const {
    using namespace dlpack;
    Described out = describe_on_any_device(g, {"grads", index});
    if (p.dtype == DType::kFloat64) {
      expect_dtype(out, DType::kFloat64, {"grads", index});
    } else if (!is_float(out.dtype) || out.dtype == DType::kFloat64) {
      throw TypeError(item_text("grads", index) + " is " + name_of(out.dtype) +
                      ", expected float32, bfloat16 or float16");
    }
    expect_same_device(out, {"grads", index}, p, {"params", index});
    expect_same_layout(out, {"grads", index}, p, {"params", index});
    return out;
  }

  // In-place kernels on overlapping memory would give results that depend on the instruction set.
  void expect_disjoint(const dlpack::Described& g, int64_t index) const {
    const auto all = parts(&g);
    for (auto a = all.begin(); p.numel > 0 && a != all.end(); ++a) {
      for (auto b = a + 1; a->tensor != nullptr && b != all.end(); ++b) {
        BW_EXPECTS(b->tensor == nullptr || !dlpack::overlap(*a->tensor, *b->tensor),
                   dlpack::item_text(a->list, index) + " and " + dlpack::item_text(b->list, index) + " share memory");
      }
    }
  }

 private:
  struct Part {
    const char* list;
    const dlpack::Described* tensor;
  };
  std::array<Part, 7> parts(const dlpack::Described* g) const {
    const auto pointer = [](const std::optional<dlpack::Described>& x) { return x ? &*x : nullptr; };
    return {{{"params", &p},
             {"grads", g},
             {"exp_avgs", &m},
             {"exp_avg_sqs", &v},
             {"max_exp_avg_sqs", pointer(vmax)},
             {"master_params", pointer(master)},
             {"remainders", pointer(remainder)}}};
  }

  static std::optional<dlpack::Described> optional(py::handle object, dlpack::Name name) {
    return object.is_none() ? std::nullopt : std::optional(dlpack::describe_on_any_device(object, name));
  }

  void expect_states(int64_t index) const {
    using namespace dlpack;
    if (p.dtype == DType::kFloat64) {
      expect_dtype(m, DType::kFloat64, {"exp_avgs", index});
    } else if (m.dtype != DType::kFloat32 && m.dtype != DType::kBFloat16) {
      throw TypeError(item_text("exp_avgs", index) + " is " + name_of(m.dtype) + ", expected float32 or bfloat16");
    }
    expect_dtype(v, m.dtype, {"exp_avg_sqs", index});
    if (vmax) {
      expect_dtype(*vmax, m.dtype, {"max_exp_avg_sqs", index});
    }
  }

  void expect_weight(int64_t index) const {
    using namespace dlpack;
    const auto expect_taken = [&](bool is_taken, const char* list) {
      if (!is_taken) {
        throw TypeError(item_text("params", index) + " is " + name_of(p.dtype) + " and takes no " + list);
      }
    };
    if (master) {
      expect_dtype(*master, DType::kFloat32, {"master_params", index});
      expect_taken(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, "master_params");
    }
    if (remainder) {
      expect_dtype(*remainder, DType::kInt16, {"remainders", index});
      expect_taken(p.dtype == DType::kBFloat16, "remainders");
      BW_EXPECTS(!master, item_text("params", index) + " has both master_params and remainders");
    }
  }
};

}  // namespace bucketwheel
