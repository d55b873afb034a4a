#include "check/op_linear_layer.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "check/op_dequant.h"
#include "check/op_sample.h"
#include "oracle/embedding.h"
#include "oracle/linear.h"

namespace assay::op {

using oracle::Array;

namespace {

// Engines make logits for the rows that they sample from alone: those rows of the input, by request and position.
Status TakeRowsOfResult(const Subject& s, Layer* layer) {
  const std::vector<RowId>&want = s.tensor()->rows, &have = layer->input.tensor->rows;
  if (want.empty() || want.size() >= have.size() || layer->x.rows() != static_cast<int64_t>(have.size()))
    return Status();
  const auto rows = FindRows(have, want);
  if (!rows) return NotRecorded(layer->input.name);
  ASSAY_ASSIGN_OR_RETURN(layer->x, oracle::TakeRows(layer->x, *rows));
  layer->input_rows = *rows;
  return Status();
}

}  // namespace

// `parts` is "q_proj:128,k_proj:64,…": rows in the order in which they lie.
bool PartRows(const EventInfo& fused, int64_t n_rows, std::string_view part, int64_t* begin, int64_t* end) {
  const std::string text = Capture::OwnText(fused, "parts").value_or("");
  int64_t at = 0;
  for (size_t from = 0; from < text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size()), colon = text.find(':', from);
    if (colon >= comma) return false;
    const int64_t rows = std::strtoll(text.c_str() + colon + 1, nullptr, 10);
    if (rows < 0 || rows > n_rows - at) return false;
    if (text.compare(from, colon - from, part) == 0) {
      *begin = at;
      *end = at + rows;
      return true;
    }
    at += rows;
    from = comma + 1;
  }
  return false;
}

Result<Array> RowsOf(const Array& w, int64_t first, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < count; ++r) rows.push_back(first + r);
  return oracle::TakeRows(w, rows);
}

Result<Layer> GatherLayer(const Subject& s, const LinearSite& site) {
  Layer layer;
  layer.input = {s.Sibling(site.input), s.Operand(s.Sibling(site.input))};
  if (layer.input.tensor == nullptr) return NotRecorded(layer.input.name);
  layer.x = ToArray(*layer.input.tensor);
  const bool whole_result = s.info().event.shard.count <= 1;
  // A whole result of a sharded input is the sum over the ranks: the product needs all columns.
  if (layer.input.tensor->info->event.shard.count > 1 && whole_result && !s.info().site.partial) {
    auto whole = s.capture().Stitched(*layer.input.tensor->info);
    if (!whole.ok()) return whole.status();
    layer.x = ToArray(**whole);
  }
  if (HasCodes(s, layer.input.name + ".", true)) {
    auto x = Dequantise(s, layer.input.name + ".", true);
    if (!x.ok()) return x.status();
    layer.x = *x;
    layer.quantised_input = true;
  }
  if (layer.x.rank() > 2) layer.x.shape = {layer.x.shape[0], layer.x.size() / std::max<int64_t>(layer.x.shape[0], 1)};
  if (const Status taken = TakeRowsOfResult(s, &layer); !taken.ok()) return taken;

  layer.weight = s.Sibling(site.weight) + ".weight";
  TensorPtr w = s.Weight(layer.weight);
  if (w == nullptr && !site.fused.empty() && !HasCodes(s, layer.weight + ".", false)) {
    const std::string name = s.Sibling(site.fused) + ".weight";
    const TensorPtr fused = s.Weight(name), codes = s.Weight(name + ".codes");
    if (fused != nullptr) {
      layer.whole = ToArray(*fused);
    } else if (codes != nullptr) {
      ASSAY_ASSIGN_OR_RETURN(layer.whole, Dequantise(s, name + ".", false));
      layer.quantised_weight = true;
    }
    const TensorPtr& stored = fused != nullptr ? fused : codes;
    int64_t end = 0;
    if (stored != nullptr && PartRows(*stored->info, layer.whole.rows(), site.part, &layer.first_row, &end)) {
      layer.weight = name;
      ASSAY_ASSIGN_OR_RETURN(layer.w, RowsOf(layer.whole, layer.first_row, end - layer.first_row));
      if (const TensorPtr b = s.Weight(s.Sibling(site.fused) + ".bias"); b != nullptr && b->n() == layer.whole.rows())
        layer.bias =
            ToArray({end - layer.first_row}, std::span(b->values).subspan(static_cast<size_t>(layer.first_row),
                                                                          static_cast<size_t>(end - layer.first_row)));
      return layer;
    }
    layer.whole = {};
    layer.quantised_weight = false;
    layer.first_row = 0;
  }
  // Tied heads have no weight of their own in memory.
  if (w == nullptr && site.result == "logits" && s.Flag("tie_word_embeddings", false)) {
    layer.weight = "embed_tokens.weight";
    w = s.Weight(layer.weight);
  }
  if (w != nullptr) {
    layer.weight_tensor = w;
    layer.w = ToArray(*w);
  } else if (HasCodes(s, layer.weight + ".", false)) {
    auto decoded = Dequantise(s, layer.weight + ".", false);
    if (!decoded.ok()) return decoded.status();
    layer.w = *decoded;
    layer.quantised_weight = true;
  } else {
    return NotRecorded(layer.weight);
  }
  if (layer.w.rank() != 2)
    layer.w.shape = {layer.w.shape.empty() ? 1 : layer.w.shape[0],
                     layer.w.size() / std::max<int64_t>(layer.w.shape.empty() ? 1 : layer.w.shape[0], 1)};
  if (const TensorPtr b = s.Weight(s.Sibling(site.weight) + ".bias")) layer.bias = ToArray({b->n()}, b->values);

  // This rank's rows of a weight that was recorded whole; all ranks' columns of one that is cut along them.
  const Shard& shard = s.info().event.shard;
  const int64_t columns = s.tensor()->row_size();
  if (layer.w.rows() != columns && shard.count > 1 && layer.w.rows() == shard.full_cols) {
    layer.whole = layer.w;
    layer.first_row = shard.col_offset;
    ASSAY_ASSIGN_OR_RETURN(layer.w, RowsOf(layer.whole, shard.col_offset, columns));
  }
  if (layer.weight_tensor != nullptr && layer.w.cols() != layer.x.cols() &&
      layer.weight_tensor->info->event.shard.count > 1) {
    std::vector<std::pair<int64_t, TensorPtr>> parts;
    for (EventId id : s.capture().EventsOf(layer.weight)) {
      const auto info = s.capture().Info(id);
      auto t = s.capture().Load(id);
      const bool known = std::any_of(parts.begin(), parts.end(),
                                     [&](const auto& p) { return p.first == info->event.shard.col_offset; });
      if (t.ok() && !known && info->audit != "before") parts.emplace_back(info->event.shard.col_offset, *t);
    }
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    Array whole;
    for (const auto& [offset, t] : parts) {
      if (whole.values.empty())
        whole = ToArray(*t);
      else {
        ASSAY_ASSIGN_OR_RETURN(whole, oracle::Concat(whole, ToArray(*t)));
      }
    }
    layer.w = std::move(whole);
  }
  if (layer.w.cols() != layer.x.cols()) {
    return NotRecorded(layer.weight + " of " + std::to_string(layer.x.cols()) + " columns");
  }
  return layer;
}

}  // namespace assay::op
