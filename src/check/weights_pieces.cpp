#include "check/weights_pieces.h"

#include <algorithm>
#include <charconv>

namespace assay {
namespace {

// The whole text as a number, else `absent`.
int64_t ToInt(std::string_view text, int64_t absent) {
  int64_t value = absent;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : absent;
}

struct Part {
  std::string stem;  // "q_proj"
  int64_t rows = 0;  // on this rank; 0: not declared
};

// "q_proj:16,k_proj:8".
std::vector<Part> DeclaredParts(const std::string& text) {
  std::vector<Part> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string_view item = std::string_view(text).substr(at, comma - at);
    const size_t colon = item.find(':');
    if (colon != std::string_view::npos) {
      parts.push_back({std::string(item.substr(0, colon)), ToInt(item.substr(colon + 1), 0)});
    }
    at = comma + 1;
  }
  return parts;
}

// Fused projections that engines make under well-known names.
std::vector<Part> KnownParts(std::string_view stem) {
  if (stem.ends_with(".qkv_proj") || stem.ends_with(".qkv")) return {{"q_proj"}, {"k_proj"}, {"v_proj"}};
  if (stem.ends_with(".gate_up_proj")) return {{"gate_proj"}, {"up_proj"}};
  if (stem.ends_with(".fused_qkv_a_proj_with_mqa") || stem.ends_with(".fused_qkv_a_proj")) {
    return {{"q_a_proj"}, {"kv_a_proj_with_mqa"}};
  }
  return {};
}

// Within its weight. The numbers of a trace may be forged.
bool Fits(const WeightPiece& p) {
  return p.first_row >= 0 && p.first_col >= 0 && p.rows > 0 && p.cols > 0 && p.rows <= p.weight->rows() - p.first_row &&
         p.cols <= p.weight->cols() - p.first_col;
}

// From the name and shape of a tensor in memory to the parts of the checkpoint that it should hold. *note: why there
// are none.
class Finder {
 public:
  Finder(const WeightSource& source, const WeightIndex& index, const MemoryTensor& tensor, std::string* note)
      : source_(source), index_(index), t_(tensor), note_(note) {}

  // A weight of the same name, experts in one tensor, parts that the recording declares, parts that are known by the
  // fused name: the first that applies.
  std::vector<WeightPiece> Find() {
    const size_t dot = t_.name.rfind('.');
    const std::string suffix = dot == std::string::npos ? "" : t_.name.substr(dot);
    const std::string stem = t_.name.substr(0, dot == std::string::npos ? t_.name.size() : dot);
    std::vector<Part> parts = DeclaredParts(t_.Meta("parts"));
    if (const Weight* whole = Lookup(t_.name); whole != nullptr && parts.empty()) return Whole(*whole);
    if (const Weight* packed = Lookup(t_.name + ".weight"); packed != nullptr) return Whole(*packed);
    if (t_.name.find("mlp.experts.") != std::string::npos && t_.event.shape.size() == 3) return Experts();
    if (parts.empty()) parts = KnownParts(stem);
    if (!parts.empty()) return Fused(stem.substr(0, stem.rfind('.') + 1), suffix, parts);
    *note_ = "the checkpoint has no " + t_.name;
    return {};
  }

 private:
  // A tied head is the embedding.
  const Weight* Lookup(const std::string& name) const {
    const auto at = index_.find(name);
    if (at != index_.end()) return at->second;
    const auto embedding = index_.find("embed_tokens.weight");
    return name == "lm_head.weight" && embedding != index_.end() ? embedding->second : nullptr;
  }

  std::vector<WeightPiece> NoFit(const Weight& weight) {
    *note_ = "shape " + ShapeText(t_.event.shape) + " on rank " + std::to_string(t_.event.rank) + " is no shard of " +
             weight.name() + " " + ShapeText(weight.shape());
    return {};
  }

  // Of a permuted q or k: how many heads the rows are grouped in, 0 where they are in order (v is never permuted).
  int64_t HeadGroups(const Weight& weight, int64_t rows, std::string_view stem) const {
    int64_t heads = ToInt(t_.Meta("rope_permuted"), 0);
    if (heads <= 0 || stem.ends_with("v_proj") || stem.ends_with("v_proj.weight")) return 0;
    if (!t_.Meta("parts").empty() && stem == "k_proj") heads = ConfigInt(source_, "num_key_value_heads", heads);
    if (heads <= 0 || heads > weight.rows()) return 0;
    // The groups of the whole; a shard has its share of them.
    if (weight.rows() == rows || weight.rows() % heads != 0) return heads;
    return std::max<int64_t>(1, rows / (weight.rows() / heads));
  }

  // First row of this rank's `rows` of `all`. More shards than distinct ones: several ranks hold the same. Below 0: the
  // shard is none of its count.
  int64_t RowOffset(int64_t all, int64_t rows) const {
    const int64_t count = std::max<int32_t>(t_.event.shard.count, 1), index = t_.event.shard.index;
    if (rows >= all || rows <= 0) return 0;
    if (index < 0 || index >= count) return -1;
    const int64_t distinct = all / rows;
    if (distinct >= count) return index * rows;
    return index / std::max<int64_t>(1, count / std::max<int64_t>(distinct, 1)) * rows;
  }

  // One weight, whole or this rank's shard by rows or by columns; shard_axis says which where shapes alone do not.
  std::vector<WeightPiece> Whole(const Weight& weight) {
    WeightPiece piece;
    piece.name = t_.name;
    piece.weight = &weight;
    piece.rows = t_.rows();
    piece.cols = t_.cols();
    const Shard& shard = t_.event.shard;
    const std::string axis = t_.Meta("shard_axis");
    if (t_.event.shape.size() <= 1 && weight.rows() == 1) {  // vectors
      piece.first_col = shard.count > 1 && piece.cols < weight.cols() ? shard.col_offset : 0;
    } else if (shard.count > 1) {
      const bool columns = axis == "1" || (axis.empty() && piece.cols < weight.cols());
      if (columns) {
        piece.first_col = shard.col_offset;
      } else {
        piece.first_row = RowOffset(weight.rows(), piece.rows);
      }
    }
    // An embedding or head may be padded to a size that the ranks divide.
    if ((weight.name().find("embed") != std::string::npos || t_.name == "lm_head.weight") && piece.first_row >= 0 &&
        piece.first_row < weight.rows()) {
      piece.rows = std::min(piece.rows, weight.rows() - piece.first_row);
    }
    if (!Fits(piece) || (shard.count <= 1 && (piece.rows != weight.rows() || piece.cols != weight.cols()) &&
                         t_.name.find("embed") == std::string::npos && t_.name != "lm_head.weight")) {
      return NoFit(weight);
    }
    piece.rope_permuted = HeadGroups(weight, piece.rows, t_.name);
    return {piece};
  }

  // Parts one behind the other along the rows, each cut to this rank's share.
  std::vector<WeightPiece> Fused(const std::string& prefix, const std::string& suffix, const std::vector<Part>& parts) {
    std::vector<WeightPiece> pieces;
    const bool vector = t_.event.shape.size() == 1;
    int64_t all_rows = 0;
    for (const Part& part : parts) {
      const Weight* weight = Lookup(prefix + part.stem + suffix);
      if (weight == nullptr) {
        *note_ = "the checkpoint has no " + prefix + part.stem + suffix;
        return {};
      }
      all_rows += vector ? weight->cols() : weight->rows();
    }
    const int64_t length = vector ? t_.cols() : t_.rows();
    int64_t at = 0;
    for (const Part& part : parts) {
      const Weight& weight = *Lookup(prefix + part.stem + suffix);
      const int64_t whole = vector ? weight.cols() : weight.rows();
      int64_t rows = part.rows;
      if (rows == 0) rows = all_rows == length ? whole : whole / std::max<int32_t>(t_.event.shard.count, 1);
      WeightPiece piece;
      piece.name = prefix + part.stem + suffix;
      piece.weight = &weight;
      const int64_t offset = RowOffset(whole, rows);
      if (rows <= 0 || rows > length - at || offset < 0 || rows > whole - offset ||
          (!vector && weight.cols() != t_.cols())) {
        return NoFit(weight);
      }
      if (vector) {  // one row; the parts are runs of columns, compared as rows of one element
        piece.first = at, piece.rows = 1, piece.cols = rows, piece.first_col = offset;
      } else {
        piece.first = at, piece.rows = rows, piece.cols = t_.cols(), piece.first_row = offset;
        piece.rope_permuted = HeadGroups(weight, rows, part.stem);
      }
      pieces.push_back(piece);
      at += rows;
    }
    if (at != length) {
      *note_ = "its parts have " + std::to_string(at) + " rows, the tensor " + std::to_string(length);
      return {};
    }
    return pieces;
  }

  // [E, 2f, h] or [E, h, f] from one weight an expert and projection.
  std::vector<WeightPiece> Experts() {
    const int64_t experts = t_.event.shape[0], rows = t_.event.shape[1];
    const bool gate_up = t_.name.find("gate_up_proj") != std::string::npos;
    const bool interleaved = t_.Meta("gate_up_layout") == "interleaved";
    const std::string prefix = t_.name.substr(0, t_.name.find("mlp.experts.") + 12);
    // Ranks that hold other experts number them from their own first one.
    const bool by_expert = t_.event.shard.count > 1 && t_.Meta("shard_axis") == "0";
    const int64_t first_expert = by_expert ? t_.event.shard.index * experts : 0;
    std::vector<WeightPiece> pieces;
    for (int64_t e = 0; e < experts; ++e) {
      const std::vector<std::string> stems =
          gate_up ? std::vector<std::string>{"gate_proj", "up_proj"} : std::vector<std::string>{"down_proj"};
      for (size_t part = 0; part < stems.size(); ++part) {
        WeightPiece piece;
        piece.name = prefix + std::to_string(first_expert + e) + "." + stems[part] + ".weight";
        piece.weight = Lookup(piece.name);
        if (piece.weight == nullptr) {
          *note_ = "the checkpoint has no " + piece.name;
          return {};
        }
        piece.rows = rows / static_cast<int64_t>(stems.size());
        piece.cols = t_.event.shape[2];
        piece.step = interleaved && gate_up ? 2 : 1;
        piece.first = e * rows + static_cast<int64_t>(part) * (piece.step == 2 ? 1 : piece.rows);
        if (!by_expert && piece.rows < piece.weight->rows())
          piece.first_row = RowOffset(piece.weight->rows(), piece.rows);
        if (!by_expert && piece.cols < piece.weight->cols()) piece.first_col = t_.event.shard.col_offset;
        if (!Fits(piece)) return NoFit(*piece.weight);
        pieces.push_back(std::move(piece));
      }
    }
    return pieces;
  }

  const WeightSource& source_;
  const WeightIndex& index_;
  const MemoryTensor& t_;
  std::string* note_;
};

}  // namespace

std::string MemoryTensor::Meta(std::string_view key) const {
  for (const auto& [own, value] : event.meta) {
    if (own == key) return value;
  }
  return {};
}

int64_t MemoryTensor::cols() const { return event.shape.empty() ? 1 : event.shape.back(); }

int64_t MemoryTensor::rows() const {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < event.shape.size(); ++i) n *= event.shape[i];
  return n;
}

std::vector<WeightPiece> PiecesOf(const WeightSource& source, const WeightIndex& index, const MemoryTensor& tensor,
                                  std::string* note) {
  return Finder(source, index, tensor, note).Find();
}

}  // namespace assay
