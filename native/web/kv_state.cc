/*!
 * The KV state of a library for the browser, in place of TVM's PagedKVCache: sequences, their pages,
 * and the integers that a forward pass takes. WebLLM drives it by TVM's `vm.builtin.kv_state_*`; the
 * library's functions read it by `everycast.kv_state_*`:
 *
 *   create   → the state, with pages for all of the context
 *   pages    → [1, num_pages, rows, width], keys and values of one layer
 *   inputs   → of the step that `BeginForward` announced, int32 on the device:
 *              positions [m], slots [m] (page · page_size + offset), query_tiles [t, 3] (sequence of
 *              the batch, first token, tokens), block_tables [b, w], logit_rows [b] (last tokens)
 *
 * What these mean: relax_models/paged_attention.py and relax_models/operators.py.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/tensor.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/runtime/vm/kv_state.h"

namespace everycast {

namespace ffi = tvm::ffi;
using tvm::runtime::Tensor;

namespace {

constexpr int64_t kBindingBytes = 128 << 20;
/*!< What every WebGPU device can bind of one buffer. */

DLDevice WebGpu() { return DLDevice{kDLWebGPU, 0}; }

int64_t CeilDiv(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

/*! A tensor on the device that is filled anew for every step, with as much as the step has. */
class StepTensor {
 public:
  StepTensor(int64_t rows, std::vector<int64_t> row)
      : row_(std::move(row)), storage_(Tensor::Empty(Shape(rows), {kDLInt, 32, 1}, WebGpu())) {}

  /*! Copies `values`, whole rows; a step must be copied before the commands that read it. */
  void Fill(std::vector<int32_t>* values) {
    int64_t row_size = 1;
    for (int64_t size : row_) row_size *= size;
    FillShaped(values, Shape(static_cast<int64_t>(values->size()) / row_size));
  }

  void FillShaped(std::vector<int32_t>* values, const ffi::Shape& shape) {
    view_ = storage_.CreateView(shape, {kDLInt, 32, 1});
    DLTensor from = *view_.operator->();
    DLTensor to = from;
    from.device = DLDevice{kDLCPU, 0};
    from.data = values->data();
    from.byte_offset = 0;
    Tensor::CopyFromTo(&from, &to);
  }

  Tensor view() const { return view_; }

 private:
  ffi::Shape Shape(int64_t rows) const {
    std::vector<int64_t> shape{rows};
    shape.insert(shape.end(), row_.begin(), row_.end());
    return ffi::Shape(shape);
  }

  std::vector<int64_t> row_;
  Tensor storage_, view_;
};

struct Sequence {
  int64_t length = 0;
  std::vector<int32_t> pages;
};

struct Sizes {
  int64_t max_sequences;
  int64_t max_tokens; /*!< Of all sequences together. */
  int64_t chunk;      /*!< Most tokens of a step. */
  int64_t page_size;
  int64_t query_tile; /*!< Most tokens of a tile. */

  int64_t num_pages() const { return CeilDiv(max_tokens, page_size) + max_sequences - 1; }
};

}  // namespace

class PagedStateObj final : public tvm::runtime::vm::KVStateObj {
 public:
  PagedStateObj(const Sizes& sizes, int64_t layers, int64_t rows, int64_t width, DLDataType dtype)
      : sizes_(sizes),
        positions_(sizes.chunk, {}),
        slots_(sizes.chunk, {}),
        tiles_(CeilDiv(sizes.chunk, sizes.query_tile) + sizes.max_sequences, {3}),
        tables_(sizes.max_sequences * sizes.num_pages(), {}),
        logit_rows_(sizes.max_sequences, {}) {
    const int64_t token_bytes = rows * width * (dtype.bits / 8) / sizes.page_size;
    TVM_FFI_CHECK(sizes.num_pages() * sizes.page_size * token_bytes <= kBindingBytes, ValueError)
        << "context_window_size " << sizes.max_tokens << " needs more than the "
        << (kBindingBytes >> 20) << " MB that WebGPU binds of a layer's keys and values; use at most "
        << kBindingBytes / token_bytes / sizes.page_size * sizes.page_size;
    for (int64_t layer = 0; layer < layers; ++layer) {
      pages_.push_back(Tensor::Empty({1, sizes.num_pages(), rows, width}, dtype, WebGpu()));
    }
    Clear();
  }

  void Clear() final {
    sequences_.clear();
    free_pages_.clear();
    for (int64_t page = sizes_.num_pages(); page > 0; --page) {
      free_pages_.push_back(static_cast<int32_t>(page - 1));
    }
  }

  void AddSequence(int64_t id) final {
    TVM_FFI_CHECK(!sequences_.count(id), ValueError) << "sequence " << id << " is already there";
    TVM_FFI_CHECK(static_cast<int64_t>(sequences_.size()) < sizes_.max_sequences, ValueError)
        << "there are already " << sizes_.max_sequences << " sequences, as many as may be";
    sequences_[id];
  }

  void RemoveSequence(int64_t id) final {
    Sequence& sequence = Find(id);
    Shrink(&sequence, 0);
    sequences_.erase(id);
  }

  void ForkSequence(int64_t, int64_t, int64_t) final {
    TVM_FFI_THROW(RuntimeError) << "sequences cannot be forked in the browser";
  }

  void PopN(int64_t id, int32_t count) final {
    Sequence& sequence = Find(id);
    TVM_FFI_CHECK(0 <= count && count <= sequence.length, ValueError)
        << "cannot remove " << count << " of " << sequence.length << " tokens";
    Shrink(&sequence, sequence.length - count);
  }

  void BeginForward(const ffi::Shape& ids, const ffi::Shape& lengths,
                    const ffi::Optional<ffi::Shape>& tree) final {
    TVM_FFI_CHECK(!tree.has_value(), ValueError) << "token trees are not supported";
    CheckStep(ids, lengths);
    std::vector<int32_t> positions, slots, tiles, logit_rows;
    size_t width = 1;
    for (size_t i = 0; i < ids.size(); ++i) {
      Sequence& sequence = Find(ids[i]);
      const int32_t first = static_cast<int32_t>(positions.size());
      const int64_t needed = CeilDiv(sequence.length + lengths[i], sizes_.page_size);
      while (static_cast<int64_t>(sequence.pages.size()) < needed) {
        sequence.pages.push_back(free_pages_.back());
        free_pages_.pop_back();
      }
      for (int64_t t = 0; t < lengths[i]; ++t, ++sequence.length) {
        const int64_t page = sequence.pages[sequence.length / sizes_.page_size];
        positions.push_back(static_cast<int32_t>(sequence.length));
        slots.push_back(static_cast<int32_t>(page * sizes_.page_size +
                                             sequence.length % sizes_.page_size));
      }
      for (int64_t t = 0; t < lengths[i]; t += sizes_.query_tile) {
        const int64_t count = std::min(sizes_.query_tile, lengths[i] - t);
        for (int64_t value : {static_cast<int64_t>(i), first + t, count}) {
          tiles.push_back(static_cast<int32_t>(value));
        }
      }
      logit_rows.push_back(static_cast<int32_t>(positions.size()) - 1);
      width = std::max(width, sequence.pages.size());
    }
    std::vector<int32_t> tables(ids.size() * width, 0);
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::vector<int32_t>& pages = Find(ids[i]).pages;
      std::copy(pages.begin(), pages.end(), tables.begin() + i * width);
    }
    positions_.Fill(&positions);
    slots_.Fill(&slots);
    tiles_.Fill(&tiles);
    tables_.FillShaped(&tables, {static_cast<int64_t>(ids.size()), static_cast<int64_t>(width)});
    logit_rows_.Fill(&logit_rows);
  }

  void EndForward() final {}

  Tensor Pages(int64_t layer) const { return pages_.at(layer); }

  ffi::Array<Tensor> Inputs() const {
    return {positions_.view(), slots_.view(), tiles_.view(), tables_.view(), logit_rows_.view()};
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("everycast.PagedState", PagedStateObj,
                                    tvm::runtime::vm::KVStateObj);

 private:
  Sequence& Find(int64_t id) {
    auto found = sequences_.find(id);
    TVM_FFI_CHECK(found != sequences_.end(), ValueError) << "there is no sequence " << id;
    return found->second;
  }

  void Shrink(Sequence* sequence, int64_t length) {
    sequence->length = length;
    while (static_cast<int64_t>(sequence->pages.size()) > CeilDiv(length, sizes_.page_size)) {
      free_pages_.push_back(sequence->pages.back());
      sequence->pages.pop_back();
    }
  }

  /*! Nothing has changed where this throws. */
  void CheckStep(const ffi::Shape& ids, const ffi::Shape& lengths) {
    TVM_FFI_CHECK(ids.size() == lengths.size() && !ids.empty(), ValueError)
        << "a step has a length for each sequence, and one at least";
    int64_t tokens = 0, pages = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const Sequence& sequence = Find(ids[i]);
      TVM_FFI_CHECK(lengths[i] > 0, ValueError) << "a sequence has a token at least";
      tokens += lengths[i];
      pages += CeilDiv(sequence.length + lengths[i], sizes_.page_size) -
               static_cast<int64_t>(sequence.pages.size());
    }
    TVM_FFI_CHECK(tokens <= sizes_.chunk, ValueError)
        << "a step has " << tokens << " tokens, " << sizes_.chunk << " may be";
    TVM_FFI_CHECK(pages <= static_cast<int64_t>(free_pages_.size()), ValueError)
        << "the context of " << sizes_.max_tokens << " tokens is full; raise context_window_size";
  }

  Sizes sizes_;
  std::vector<Tensor> pages_;
  std::unordered_map<int64_t, Sequence> sequences_;
  std::vector<int32_t> free_pages_;
  StepTensor positions_, slots_, tiles_, tables_, logit_rows_;
};

namespace {

const PagedStateObj* State(const tvm::runtime::vm::KVState& state) {
  const auto* found = state.as<PagedStateObj>();
  TVM_FFI_CHECK(found != nullptr, TypeError) << "this is not the library's own KV state";
  return found;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  using tvm::runtime::vm::KVState;
  refl::GlobalDef()
      .def("everycast.kv_state_create",
           [](ffi::Shape max_sequences, ffi::Shape max_tokens, ffi::Shape chunk,
              ffi::Shape page_size, ffi::Shape layout, DLDataType dtype) {
             // layout: layers, page_size, rows, width, query_tile
             TVM_FFI_CHECK(page_size[0] == layout[1], ValueError)
                 << "pages have " << layout[1] << " tokens in this library, not " << page_size[0];
             Sizes sizes{max_sequences[0], max_tokens[0], chunk[0], layout[1], layout[4]};
             return KVState(ffi::make_object<PagedStateObj>(sizes, layout[0], layout[2], layout[3],
                                                            dtype));
           })
      .def("everycast.kv_state_pages",
           [](KVState state, int64_t layer) { return State(state)->Pages(layer); })
      .def("everycast.kv_state_inputs", [](KVState state) { return State(state)->Inputs(); });
}

}  // namespace
}  // namespace everycast
