// Rotary embedding of queries and keys, and the table of cosines and sines.
#include "check/op_rope.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "check/helpers.h"
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "oracle/norm.h"
#include "oracle/rope_fit.h"

namespace assay::op {
namespace {
constexpr std::string_view kRotated[] = {"attn.q",    "attn.k",         "attn.q_pe",
                                         "attn.k_pe", "attn.indexer.q", "attn.indexer.k"};
}  // namespace

bool IsRotated(std::string_view stem) {
  return std::find(std::begin(kRotated), std::end(kRotated), stem) != std::end(kRotated);
}

// Kind, base and scaling from rope.* metadata, with the defaults of docs/fields.md; head_size: columns of the tensor
// that is judged. kBadInput: an unknown rope.type, or numbers that make no frequencies.
Result<Rotation> RotationOf(const Subject& s, int64_t head_size) {
  Rotation r;
  const std::string type = s.Text("rope.type", "default");
  using oracle::RopeScaling;
  if (type == "linear")
    r.spec.scaling = RopeScaling::kLinear;
  else if (type == "llama3")
    r.spec.scaling = RopeScaling::kLlama3;
  else if (type == "yarn")
    r.spec.scaling = RopeScaling::kYarn;
  else if (type != "default")
    return Status::BadInput(s.info().name + ": rope.type=" + type + " is not known");
  const auto optional = [&](std::string_view key) { return s.capture().Number(s.info(), key); };
  r.spec.theta = s.Number("rope.theta", 10000);
  // In MLA the rotated part has a tensor of its own, which may be recorded behind the whole.
  int64_t dim = head_size;
  for (std::string_view stem : {"attn.k_pe", "attn.q_pe"}) {
    const auto parts = s.capture().EventsOf(s.Sibling(stem));
    if (parts.empty()) continue;
    const auto& shape = s.capture().Info(parts.front())->event.shape;
    if (!shape.empty()) dim = shape.back();
  }
  r.spec.dim = std::min(s.Integer("rope.dim", dim), head_size);
  r.spec.factor = s.Number("rope.factor", 1);
  r.spec.original_max_position = s.Number("rope.original_max_position", 0);
  r.spec.beta_fast = s.Number("rope.beta_fast", 32);
  r.spec.beta_slow = s.Number("rope.beta_slow", 1);
  r.spec.truncate = s.Flag("rope.truncate", true);
  r.spec.mscale = optional("rope.mscale");
  r.spec.mscale_all_dim = optional("rope.mscale_all_dim");
  r.spec.attention_factor = optional("rope.attention_factor");
  r.spec.low_freq_factor = s.Number("rope.low_freq_factor", 1);
  r.spec.high_freq_factor = s.Number("rope.high_freq_factor", 4);
  r.layout.pairing =
      s.Text("rope.pairing", "half") == "interleaved" ? oracle::Pairing::kInterleaved : oracle::Pairing::kHalf;
  const auto recorded = [&](std::string_view stem) { return s.capture().HasSite(s.Sibling(stem)); };
  // MLA keeps the part without position in front and rotates the end of the head; others rotate its beginning.
  r.layout.from_end = recorded("attn.kv_a") || recorded("attn.kv_c_normed") || recorded("attn.q_pe");
  ASSAY_ASSIGN_OR_RETURN(r.frequencies, oracle::MakeFrequencies(r.spec));
  return r;
}

}  // namespace assay::op

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

struct Raw {
  Input input;
  std::string norm;     // full name of the weight of a norm before the rotation, or empty
  int64_t columns = 0;  // the last so many of each head are the operand; 0: all
};

// What a rotated tensor is made of.
// attn.q and attn.k come from their projections, behind a norm where its weight was recorded; q_pe and k_pe are the
// last columns of q_proj and kv_a.
Raw RawOf(const Subject& s) {
  const std::string stem = s.info().name.substr(s.info().prefix.size());
  Raw raw;
  std::string from = stem + "_proj";
  if (stem == "attn.q_pe") from = "attn.q_proj";
  if (stem == "attn.k_pe") from = "attn.kv_a";
  if (stem == "attn.q_pe" || stem == "attn.k_pe") raw.columns = s.tensor()->dim(-1);
  raw.input = {s.Sibling(from), s.Operand(s.Sibling(from))};
  if (raw.input.tensor == nullptr && stem == "attn.k_pe") {
    raw.input = {s.Sibling("attn.k_proj"), s.Operand(s.Sibling("attn.k_proj"))};
  }
  if (stem == "attn.q" || stem == "attn.k") {
    const std::string weight = s.Sibling(stem + "_norm.weight");
    if (s.Weight(weight) != nullptr) raw.norm = weight;
  }
  return raw;
}

// The operand as it enters the rotation: shape of the result, behind the norm.
Result<oracle::Computed> Before(const Subject& s, const Raw& raw, std::span<const Array> in) {
  Array x = in[0];
  if (raw.columns > 0 && x.rank() >= 2) {
    ASSAY_ASSIGN_OR_RETURN(x, oracle::TakeColumns(x, x.cols() - raw.columns, x.cols()));
  }
  if (x.size() != s.actual().size())
    return Status::BadInput(raw.input.name + " has another shape than " + s.info().name);
  x.shape = s.actual().shape;
  oracle::Computed out;
  if (in.size() > 1) {
    const double eps = s.Number("eps", 1e-6);
    // A norm's weight is that of one head (qwen3, shared by all) or of the whole row.
    const bool whole_row = in[1].size() != x.cols();
    if (whole_row) {
      ASSAY_ASSIGN_OR_RETURN(
          x, oracle::Reshape(std::move(x), {s.actual().shape[0], s.actual().size() / s.actual().shape[0]}));
      if (in[1].size() != x.cols()) return Status::BadInput(raw.norm + " has another size than a head or a row");
    }
    ASSAY_ASSIGN_OR_RETURN(out, oracle::RmsNorm(x, in[1], eps));
    out.value.shape = s.actual().shape;
  } else {
    out.value = std::move(x);
  }
  return out;
}

// One a row of axis 0; rows of no known request turn by 0 and are not judged.
std::vector<double> PositionsOf(const Tensor& t) {
  std::vector<double> out;
  for (const RowId& id : t.rows) out.push_back(id.known ? static_cast<double>(id.position) : 0);
  return out;
}

// Rotation behind what came before; roundings of both add up.
Result<oracle::Computed> Turn(const oracle::Computed& before, std::span<const double> positions, const Rotation& r) {
  ASSAY_ASSIGN_OR_RETURN(oracle::Computed out, oracle::Rotate(before.value, positions, r.frequencies, r.layout));
  if (before.scale.values.empty()) return out;  // no norm
  out.k += before.k;
  out.stores += before.stores;
  return out;
}

// Positions by which the rows were turned, where that can be told.
struct Turned {
  int64_t position, used;
  uint64_t request;
};

// Searched from -32 to twice the largest position and 256 more: off-by-some and doubled positions lie inside. Empty as
// soon as one row's position cannot be told or is no whole number: half an explanation is none.
std::vector<Turned> FittedRows(const Subject& s, const oracle::Computed& before, const Rotation& r,
                               std::span<const int64_t> wrong) {
  std::vector<Turned> out;
  int64_t last = 0;
  for (const RowId& id : s.tensor()->rows) last = std::max(last, id.position);
  auto x = oracle::TakeRows(before.value, wrong), y = oracle::TakeRows(s.actual(), wrong);
  if (!x.ok() || !y.ok()) return out;
  auto fit = oracle::FitRotation(*x, *y, r.frequencies, r.layout, -32, 2 * std::min<int64_t>(last, 1 << 17) + 256);
  if (!fit.ok()) return out;
  for (size_t i = 0; i < wrong.size(); ++i) {
    const RowId& id = s.tensor()->rows[static_cast<size_t>(wrong[i])];
    const oracle::RowRotation& row = fit->rows[i];
    if (!row.decidable || !(std::abs(row.position - std::round(row.position)) <= 0.05)) return {};
    out.push_back({id.position, check::IntegerOf(std::round(row.position)), id.request});
  }
  return out;
}

// Every wrong row must fit a rotation by some whole position, and all of them together the positions found. What the
// positions have in common (one offset, one position, the drafts of speculation) is said, and told from later steps
// where one step leaves it open.
std::optional<Explanation> ExplainPositions(const Subject& s, const Rotation& r, const oracle::Computed& before,
                                            const Difference& d) {
  // At most 256 rows are searched; the others are then left out of the judgement of the fit.
  const std::vector<int64_t> wrong(d.rows.begin(),
                                   d.rows.begin() + static_cast<int64_t>(std::min<size_t>(d.rows.size(), 256)));
  std::vector<Turned> turned = FittedRows(s, before, r, wrong);
  if (turned.size() != wrong.size()) return std::nullopt;
  std::vector<double> positions = PositionsOf(*s.tensor());
  for (size_t i = 0; i < wrong.size(); ++i)
    positions[static_cast<size_t>(wrong[i])] = static_cast<double>(turned[i].used);
  std::vector<char> judged = s.judged();
  for (size_t i = wrong.size(); i < d.rows.size(); ++i) judged[static_cast<size_t>(d.rows[i])] = 0;
  auto fit = Turn(before, positions, r);
  if (!fit.ok() || !Differ(s.actual(), *fit, s.precision(), judged, 8).ok) return std::nullopt;

  // Positions that ran ahead by the drafts which were not accepted.
  EventFilter filter;
  filter.step = s.info().event.step - 1;
  for (EventId id : s.capture().Find("spec.accepted", filter)) {
    auto accepted = s.capture().Load(id);
    const auto drafts = s.capture().Integer(*s.capture().Info(id), "drafts");
    if (!accepted.ok() || !drafts || (*accepted)->values.size() != (*accepted)->rows.size()) continue;
    bool all = true;
    for (const Turned& t : turned) {
      bool same = false;
      for (size_t b = 0; b < (*accepted)->rows.size(); ++b) {
        if ((*accepted)->rows[b].request != t.request) continue;
        same = t.used - t.position == *drafts - check::IntegerOf((*accepted)->values[b]);
      }
      all = all && same;
    }
    if (all) return Explanation{fault_class::kSpec, "positions used are ahead by the drafts that were not accepted"};
  }

  // One position for all, or one offset: later steps of the site tell.
  EventFilter later;
  later.rank = s.info().event.rank;
  for (EventId id : s.capture().Find(s.info().name, later)) {
    if (id == s.info().id || !s.capture().Earlier(s.info().id, id) || turned.size() > 300) continue;
    auto tensor = s.capture().Load(id);
    if (!tensor.ok() || (*tensor)->info->audit == "before" || (*tensor)->rows.empty()) continue;
    Subject other(s.capture(), *tensor, s.report());
    const Raw own = RawOf(other);
    if (own.input.tensor == nullptr) continue;
    std::vector<Array> in{ToArray(*own.input.tensor)};
    if (!own.norm.empty()) in.push_back(ToArray(*other.Weight(own.norm)));
    auto x = Before(other, own, in);
    if (!x.ok()) continue;
    auto right = Turn(*x, PositionsOf(**tensor), r);
    if (!right.ok() || right->value.size() != other.actual().size()) continue;
    const Difference e = Differ(other.actual(), *right, other.precision(), other.judged());
    for (const Turned& t : FittedRows(other, *x, r, e.rows)) turned.push_back(t);
  }
  bool one_offset = true, one_position = true, several = false;
  for (const Turned& t : turned) {
    one_offset = one_offset && t.used - t.position == turned[0].used - turned[0].position;
    one_position = one_position && t.used == turned[0].used;
    several = several || t.position != turned[0].position;
  }
  Explanation why{fault_class::kRopePos, "row of position " + std::to_string(turned[0].position) +
                                             " is turned by position " + std::to_string(turned[0].used)};
  if (one_position && several) {
    why.constant = static_cast<double>(turned[0].used);
    why.meaning = "position used, the same for every row";
  } else {
    why.constant = static_cast<double>(turned[0].used - turned[0].position);
    why.meaning =
        one_offset ? "position used - position of the row" : "position used - position of the row, for the first";
  }
  return why;
}

// The explanation of frequencies without the declared scaling: of linear scaling, which multiplies all of them alike,
// with the constant.
Explanation WithoutScaling(const oracle::RopeSpec& spec) {
  Explanation why{fault_class::kRopeForm, "fits frequencies without the scaling of the context"};
  if (spec.scaling == oracle::RopeScaling::kLinear) {
    why.constant = spec.factor;
    why.meaning = "frequency used / declared";
  }
  return why;
}

// All frequencies off by one constant: another factor of linear scaling than the declared one (twice, say), or linear
// scaling where none is declared, or frequencies multiplied by the factor that should divide them. Factors in use are
// powers of two.
std::optional<Explanation> ExplainFactor(const Subject& s, const Rotation& r, const oracle::Computed& before,
                                         std::span<const double> positions) {
  const bool linear = r.spec.scaling == oracle::RopeScaling::kLinear;
  if (!linear && r.spec.scaling != oracle::RopeScaling::kDefault) return std::nullopt;
  const double declared = linear ? r.spec.factor : 1;
  std::vector<double> factors = {declared * declared, 1 / declared};
  for (double factor = 2; factor <= 64; factor *= 2) factors.push_back(factor);
  for (double factor : factors) {
    const double c = declared / factor;
    if (c == 1) continue;
    Rotation changed = r;
    for (double& f : changed.frequencies.inverse) f *= c;
    if (!Fits(s, Turn(before, positions, changed))) continue;
    return Explanation{fault_class::kRopeForm, "fits frequencies scaled by the factor " + FactorText(factor, 6), c,
                       "frequency used / declared"};
  }
  return std::nullopt;
}

// Order: length, overwritten operand, pairing, which end, no rotation, direction, strides, scaling, positions, base. A
// pairing or an end changes every row and is exact; positions, bases and frequencies are searches, so they come last.
std::optional<Explanation> ExplainRotation(const Subject& s, const Raw& raw, const Rotation& r,
                                           const oracle::Computed& before, const Difference& d,
                                           const oracle::Computed& right) {
  const double tolerance = std::max(1e-4, 8 * s.precision().store);
  if (const double c = ConstantRatio(s.actual(), right.value, s.judged(), tolerance); !std::isnan(c)) {
    // Rows that are not rotated at all keep their length: such a ratio says nothing of a scale.
    return Explanation{fault_class::kScale, "the rotation is right and its length is not", c,
                       "rotated used / expected"};
  }
  if (r.layout.from_end || r.spec.dim < s.actual().cols()) {  // the rotated part alone
    const int64_t dim = r.spec.dim, cols = s.actual().cols(), begin = r.layout.from_end ? cols - dim : 0;
    auto a = oracle::TakeColumns(s.actual(), begin, begin + dim),
         b = oracle::TakeColumns(right.value, begin, begin + dim);
    if (a.ok() && b.ok() && dim < cols) {
      if (const double c = ConstantRatio(*a, *b, s.judged(), tolerance); !std::isnan(c)) {
        return Explanation{fault_class::kScale, "the rotation is right and its length is not", c,
                           "rotated used / expected"};
      }
    }
  }
  if (auto why = ExplainOverwritten(s, {{raw.input}, [](std::span<const Array>) -> Result<oracle::Computed> {
                                          return Status::BadInput("copy");
                                        }})) {
    return why;
  }
  const std::vector<double> positions = PositionsOf(*s.tensor());
  const auto other = [&](auto change) {
    Rotation changed = r;
    change(changed);
    auto frequencies = oracle::MakeFrequencies(changed.spec);
    if (!frequencies.ok()) return false;
    changed.frequencies = *frequencies;
    auto turned = Turn(before, positions, changed);
    return turned.ok() && Fits(s, turned);
  };
  const auto flip = [](Rotation& x) {
    x.layout.pairing =
        x.layout.pairing == oracle::Pairing::kHalf ? oracle::Pairing::kInterleaved : oracle::Pairing::kHalf;
  };
  if (other(flip)) return Explanation{fault_class::kRopeForm, "fits the other pairing of elements"};
  if (r.spec.dim < s.actual().cols()) {
    if (other([](Rotation& x) { x.layout.from_end = !x.layout.from_end; })) {
      return Explanation{fault_class::kRopeForm, "fits a rotation of the other end of the head"};
    }
    if (other([&](Rotation& x) { x.spec.dim = s.actual().cols(); })) {
      return Explanation{fault_class::kRopeForm, "fits a rotation of the whole head"};
    }
  }
  if (r.spec.dim < s.actual().cols() && r.spec.scaling == oracle::RopeScaling::kDefault) {
    Rotation wide = r;
    for (size_t i = 0; i < wide.frequencies.inverse.size(); ++i)
      wide.frequencies.inverse[i] =
          std::pow(r.spec.theta, -static_cast<double>(2 * i) / static_cast<double>(s.actual().cols()));
    if (Fits(s, Turn(before, PositionsOf(*s.tensor()), wide)))
      return Explanation{fault_class::kRopeForm, "fits frequencies over the size of the head in place of rope.dim"};
  }
  // Rows of several positions that are as they came in, from the first call on: no rotation at all.
  // Only in the first call: later ones may hold an old buffer that happens to be unrotated, which is another fault.
  const auto calls = s.capture().EventsOf(s.info().name);
  const bool first_call = std::none_of(calls.begin(), calls.end(), [&](EventId id) {
    return s.capture().Info(id)->event.rank == s.info().event.rank && s.capture().Earlier(id, s.info().id);
  });
  std::set<int64_t> seen;
  for (size_t i = 0; i < s.tensor()->rows.size(); ++i) {
    if (s.judged()[i] && s.tensor()->rows[i].position > 0) seen.insert(s.tensor()->rows[i].position);
  }
  const std::vector<double> nowhere(positions.size(), 0);
  if (first_call && seen.size() > 1 && Fits(s, Turn(before, nowhere, r)))
    return Explanation{fault_class::kRopeForm, "fits rows that were not rotated at all"};
  std::vector<double> back = positions;
  for (double& p : back) p = -p;
  if (Fits(s, Turn(before, back, r)))
    return Explanation{fault_class::kRopeForm, "fits a rotation in the other direction"};
  if (auto why = ExplainRowWalk(s, r, before, positions)) return why;
  if (r.spec.scaling != oracle::RopeScaling::kDefault &&
      other([](Rotation& x) { x.spec.scaling = oracle::RopeScaling::kDefault; })) {
    return WithoutScaling(r.spec);
  }
  // Of a declared factor another one goes before positions that are multiples of the rows' own; else behind them.
  const bool linear = r.spec.scaling == oracle::RopeScaling::kLinear;
  if (linear) {
    if (auto why = ExplainFactor(s, r, before, positions)) return why;
  }
  if (r.spec.scaling == oracle::RopeScaling::kYarn && other([](Rotation& x) { x.spec.truncate = !x.spec.truncate; })) {
    return Explanation{fault_class::kRopeForm, r.spec.truncate ? "fits a ramp whose ends lie between pairs"
                                                               : "fits a ramp whose ends were rounded to whole pairs"};
  }
  if (auto why = ExplainAngles(s, r, positions, right,
                               [&](const Rotation& coarse) { return Turn(before, positions, coarse); }))
    return why;
  if (auto why = ExplainPositions(s, r, before, d)) return why;
  if (!linear) {
    if (auto why = ExplainFactor(s, r, before, positions)) return why;
  }
  // Bases of models in use: a config's default taken for the model's own.
  for (double theta : {10000.0, 100000.0, 150000.0, 500000.0, 1000000.0, 5000000.0, 8000000.0, 10000000.0}) {
    if (theta != r.spec.theta && other([&](Rotation& x) { x.spec.theta = theta; })) {
      return Explanation{fault_class::kRopeForm, "fits another base of the frequencies", theta, "theta used"};
    }
  }
  return ExplainFrequencies(s, r, before.value, positions, right,
                            [&](const Rotation& used) { return Turn(before, positions, used); });
}

// A layer without rotary embedding says so: rope.type=none, rope.dim=0, or op=copy.
bool IsCopy(const Subject& s) {
  return s.Text("rope.type", "default") == "none" || s.Integer("rope.dim", 1) == 0 ||
         Capture::OwnText(s.info(), "op").value_or("") == "copy";
}

// How the layers with rotary embedding turn: keys of the first one that states a size, else those of the model.
Result<Rotation> RotationOfOthers(const Subject& s, int64_t head_size) {
  const std::string stem = s.info().name.substr(s.info().prefix.size());
  for (const std::string& name : s.capture().NamesOfStem(stem)) {
    for (EventId id : s.capture().EventsOf(name)) {
      const auto tensor = s.capture().Load(id);
      if (!tensor.ok()) break;
      const Subject other(s.capture(), *tensor, s.report());
      if (IsCopy(other)) break;  // said on every event of a site or on none
      return RotationOf(other, head_size);
    }
  }
  Rotation plain;
  plain.spec.theta = s.capture().Number(s.info(), "model.rope_theta").value_or(plain.spec.theta);
  plain.spec.dim = head_size;
  ASSAY_ASSIGN_OR_RETURN(plain.frequencies, oracle::MakeFrequencies(plain.spec));
  return plain;
}

// The result of a layer without rotary embedding: its operand, behind the norm where there is one.
void JudgeCopy(Subject& s, const Raw& raw) {
  Operation copy;
  copy.inputs.push_back(raw.input);
  if (!raw.norm.empty()) copy.inputs.push_back({raw.norm, s.Weight(raw.norm)});
  copy.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, Before(s, raw, in));
    if (!y.scale.values.empty()) return y;
    y.scale = y.value;  // no norm: not a bit may change, but a result may be stored coarser
    for (double& x : y.scale.values) x = std::abs(x);
    y.stores = 1;
    return y;
  };
  JudgeOperation(s, copy, [&](const Difference&, const oracle::Computed&) -> std::optional<Explanation> {
    const auto before = Before(s, raw, copy.arrays());
    auto rotation = RotationOfOthers(s, s.tensor()->dim(-1));
    if (!before.ok() || !rotation.ok()) return std::nullopt;
    for (int flipped = 0; flipped < 2; ++flipped) {
      if (flipped == 1) {
        rotation->layout.pairing =
            rotation->layout.pairing == oracle::Pairing::kHalf ? oracle::Pairing::kInterleaved : oracle::Pairing::kHalf;
      }
      if (Fits(s, Turn(*before, PositionsOf(*s.tensor()), *rotation)))
        return Explanation{fault_class::kRopeForm, "fits rows that were rotated, in a layer without rotary embedding"};
    }
    return std::nullopt;
  });
}

// A rotated tensor [T, H, d] (or a part of a head) of its projection and the rows' positions.
void JudgeRotated(Subject& s) {
  // Where the rotated part stands alone, it is judged there and the whole is its parts put together.
  const std::string stem = s.info().name.substr(s.info().prefix.size());
  if ((stem == "attn.q" || stem == "attn.k") && s.capture().HasSite(s.Sibling(stem + "_pe"))) return;
  const Raw raw = RawOf(s);
  if (raw.input.tensor == nullptr) {
    if (!s.capture().HasSite(s.Sibling("attn.k_nope")) && !s.capture().HasSite(s.Sibling("attn.q_nope")))
      Missing(s, raw.input.name);
    return;
  }
  if (s.tensor()->rows.empty()) return;
  if (IsCopy(s)) return JudgeCopy(s, raw);
  bool declared = s.capture().ProcessText(s.info(), "model.rope_theta").has_value() || s.Flag("compiled", false) ||
                  s.Flag("inplace", false);
  for (std::string_view key : {"rope.theta", "rope.type", "rope.pairing", "rope.dim"}) {
    declared = declared || Capture::OwnText(s.info(), key).has_value();
  }
  // A model without rotary embedding has nothing to declare, and copies.
  if (!declared && DifferExactly(s.actual(), ToArray({s.actual().shape}, raw.input.tensor->values), s.judged()).ok) {
    s.report().Missing(s.info().name + " is a copy and has no rope.* metadata",
                       "record it with rope.theta, rope.pairing and so on");
    return;
  }
  auto rotation = RotationOf(s, raw.columns > 0 ? raw.columns : s.tensor()->dim(-1));
  if (!rotation.ok()) return s.report().Missing(rotation.status().message(), "record it with the rope.* keys");
  Operation turn;
  turn.inputs.push_back(raw.input);
  if (!raw.norm.empty()) turn.inputs.push_back({raw.norm, s.Weight(raw.norm)});
  const std::vector<double> positions = PositionsOf(*s.tensor());
  turn.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed before, Before(s, raw, in));
    return Turn(before, positions, *rotation);
  };
  JudgeOperation(s, turn, [&](const Difference& d, const oracle::Computed& right) -> std::optional<Explanation> {
    auto before = Before(s, raw, turn.arrays());
    if (!before.ok()) return std::nullopt;
    if (auto why = ExplainRotation(s, raw, *rotation, *before, d, right)) return why;
    return ExplainNormBefore(s, turn, right);
  });
}

// rope.cos_sin [positions, dim]: row p is position p.
void JudgeTable(Subject& s) {
  const int64_t dim = s.tensor()->dim(-1);
  auto rotation = RotationOf(s, dim);
  if (!rotation.ok()) return s.report().Missing(rotation.status().message(), "record it with the rope.* keys");
  std::vector<double> positions(static_cast<size_t>(s.actual().rows()));
  for (size_t p = 0; p < positions.size(); ++p) positions[p] = static_cast<double>(p);
  Operation make;
  make.run = [&](std::span<const Array>) -> Result<oracle::Computed> {
    return oracle::CosSinTable(rotation->frequencies, positions);
  };
  JudgeOperation(s, make, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const double tolerance = std::max(1e-4, 8 * s.precision().store);
    if (const double c = ConstantRatio(s.actual(), right.value, s.judged(), tolerance); !std::isnan(c)) {
      return Explanation{fault_class::kScale, "cosines and sines are one constant off", c, "table used / expected"};
    }
    for (double by : {1.0, -1.0}) {
      std::vector<double> moved = positions;
      for (double& p : moved) p += by;
      if (Fits(s, oracle::CosSinTable(rotation->frequencies, moved))) {
        return Explanation{fault_class::kRopePos, "the table begins at another position", by,
                           "position used - position of the row"};
      }
    }
    const auto fits = [&](const oracle::RopeSpec& spec) {
      const auto f = oracle::MakeFrequencies(spec);
      return f.ok() && FitsBetter(s, right, oracle::CosSinTable(*f, positions));
    };
    oracle::RopeSpec plain = rotation->spec;
    plain.scaling = oracle::RopeScaling::kDefault;
    if (rotation->spec.scaling != oracle::RopeScaling::kDefault && fits(plain)) return WithoutScaling(rotation->spec);
    plain = rotation->spec;
    plain.truncate = !plain.truncate;
    if (rotation->spec.scaling == oracle::RopeScaling::kYarn && fits(plain)) {
      return Explanation{fault_class::kRopeForm, "fits the other rule for the ends of the ramp (rope.truncate)"};
    }
    const auto run = [&](const Rotation& used) -> Result<oracle::Computed> {
      return oracle::CosSinTable(used.frequencies, positions);
    };
    if (auto why = ExplainAngles(s, *rotation, positions, right, run)) return why;
    // A row of the table is (1, 0) turned by the row's position, in halves.
    Array ones = Array::Filled(s.actual().shape);
    for (int64_t i = 0; i < ones.size(); ++i) ones[i] = i % dim < dim / 2 ? 1 : 0;
    Rotation halves = *rotation;
    halves.layout = {oracle::Pairing::kHalf, false};
    return ExplainFrequencies(s, halves, ones, positions, right, run);
  });
}

}  // namespace

// Tables are recorded at load or in a step, so they are looked for in both.
void JudgeRope(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kTable[] = {"rope.cos_sin"};
  JudgeStems(capture, report, kTable, JudgeTable, true);
  JudgeStems(capture, report, kTable, JudgeTable, false);
  JudgeStems(capture, report, kRotated, JudgeRotated);
}

// Parts put together: attn.q of q_nope and q_pe, attn.k of k_nope and k_pe broadcast over the heads, attn.q_nope cut
// out of attn.q_proj.
void JudgeBroadcast(const Capture& capture, CheckReport* report) {
  const auto judge = [](std::string_view nope, std::string_view pe) {
    return [nope, pe](Subject& s) {
      const TensorPtr a = s.Operand(s.Sibling(nope)), b = s.Operand(s.Sibling(pe));
      if (a == nullptr || b == nullptr) return;
      Operation join;
      join.inputs = {{a->info->name, a}, {b->info->name, b}};
      join.run = [&s](std::span<const Array> in) -> Result<oracle::Computed> {
        const int64_t heads = s.actual().rank() == 3 ? s.actual().shape[1] : 1, cols = s.actual().cols();
        const int64_t n = s.actual().shape.empty() ? 0 : s.actual().shape[0], left = in[0].cols(), right = in[1].cols();
        const int64_t pe_heads = n * right == 0 ? 0 : in[1].size() / (n * right);
        if (left + right != cols || in[0].size() != n * heads * left || (pe_heads != 1 && pe_heads != heads)) {
          return Status::BadInput("the parts of " + s.info().name + " have other shapes");
        }
        oracle::Computed out;
        out.value = Array::Filled(s.actual().shape);
        for (int64_t t = 0; t < n; ++t) {
          for (int64_t h = 0; h < heads; ++h) {
            for (int64_t c = 0; c < cols; ++c) {
              out.value[(t * heads + h) * cols + c] =
                  c < left ? in[0][(t * heads + h) * left + c]
                           : in[1][(t * pe_heads + (pe_heads == 1 ? 0 : h)) * right + c - left];
            }
          }
        }
        out.scale = out.value;
        for (double& x : out.scale.values) x = std::abs(x);
        return out;
      };
      JudgeOperation(s, join, [&](const Difference&, const oracle::Computed&) {
        return std::optional<Explanation>(
            {fault_class::kStride, "the parts are not what the whole holds: another layout or broadcast"});
      });
    };
  };
  constexpr std::string_view kQ[] = {"attn.q"}, kK[] = {"attn.k"};
  JudgeStems(capture, report, kQ, judge("attn.q_nope", "attn.q_pe"));
  JudgeStems(capture, report, kK, judge("attn.k_nope", "attn.k_pe"));
}

}  // namespace assay::check
