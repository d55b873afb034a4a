// Shapes at the boundaries: a site keeps the extents of its fixed axes from step to step, and its dtype on all ranks,
// query and output of an attention have the same rows and heads, and a view that was written does not lie on itself.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <span>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// Axes whose extent is not the model's: tokens, requests, keys, slots, blocks, sorted rows, capacities.
bool IsFixed(std::string_view axis) {
  static constexpr std::string_view kFree[] = {"T", "B", "K", "S", "R", "P", "n", "k", "C", "k+1"};
  return std::find(std::begin(kFree), std::end(kFree), axis) == std::end(kFree);
}

std::vector<std::string_view> Axes(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t at = 0; at < text.size();) {
    const size_t space = std::min(text.find(' ', at), text.size());
    if (space > at) out.push_back(text.substr(at, space - at));
    at = space + 1;
  }
  return out;
}

// Extents of the fixed axes; empty when the axes do not fit the rank.
std::vector<int64_t> FixedExtents(const EventInfo& info) {
  const auto axes = Axes(info.axes);
  std::vector<int64_t> out;
  if (axes.size() != info.event.shape.size()) return out;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (IsFixed(axes[i]) && static_cast<int32_t>(i) != info.event.row_axis) out.push_back(info.event.shape[i]);
  }
  return out;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

struct Axis {
  int64_t stride, last;  // > 0: the sign of a stride moves the view, and does not fold it; extent - 1
  int64_t reach;         // largest offset that the axes of smaller strides cover
};

// Whether steps d of these axes, |d| <= last each, add up to an offset; `moved`: some step has been taken, without
// which an offset of 0 is the element itself. Axes ascend by stride, so that those below leave few steps to the last
// one. *work: how many more may be tried; at 0 the answer is no.
bool Meets(std::span<const Axis> axes, int64_t offset, bool moved, int64_t* work) {
  if (axes.empty()) return offset == 0 && moved;
  const Axis& axis = axes.back();
  // Those that leave what the axes below can reach, and for the rounding of the quotients one more at either end. Of
  // two opposite moves one is tried.
  const int64_t from = std::max(moved ? -axis.last : 0, (offset - axis.reach) / axis.stride - 1),
                to = std::min(axis.last, (offset + axis.reach) / axis.stride + 1);
  for (int64_t d = from; d <= to && *work > 0; ++d) {
    --*work;
    const int64_t rest = offset - d * axis.stride;
    if (std::abs(rest) > axis.reach) continue;
    if (Meets(axes.first(axes.size() - 1), rest, moved || d != 0, work)) return true;
  }
  return false;
}

// Two elements of the view have one address. Broadcast (stride 0) is an intended form of it in operands. false as well
// where finding out would cost too much, or the view is larger than any memory.
bool LiesOnItself(const Event& e) {
  constexpr int64_t kMostWork = int64_t{1} << 16, kMemory = int64_t{1} << 60;
  std::vector<Axis> axes;
  for (size_t i = 0; i < e.shape.size() && i < e.strides.size(); ++i) {
    if (e.shape[i] <= 0) return false;
    if (e.shape[i] == 1 || e.strides[i] == 0) continue;
    if (e.strides[i] < -kMemory || e.strides[i] > kMemory) return false;
    axes.push_back({std::abs(e.strides[i]), e.shape[i] - 1, 0});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  for (Axis& axis : axes) {
    axis.reach = reach;
    if (axis.last > (kMemory - reach) / axis.stride) return false;
    reach += axis.last * axis.stride;
  }
  int64_t work = kMostWork;
  return Meets(axes, 0, false, &work);
}

Suspicion Broken(const EventInfo& info, std::string line) {
  Suspicion s = At(info, fault_class::kStride, 0);
  s.local = false;
  s.bad.bound_basis = "exact: shapes and strides";
  s.bad.confidence = 0.7;
  s.bad.evidence.push_back(std::move(line));
  return s;
}

// Results that have the query's rows and heads.
void JudgeHeads(const Capture& capture, const EventInfo& out, CheckReport* report) {
  const auto q = capture.Operand(out, out.prefix + "attn.q");
  if (!q) return;
  const auto query = capture.Info(*q);
  const auto& a = query->event.shape;
  const auto& b = out.event.shape;
  if (a.size() != 3 || b.size() != 3 || query->event.row_axis != 0 || out.event.row_axis != 0) return;
  if (a[0] == b[0] && a[1] == b[1]) return report->Right(out.id);
  report->Found(Broken(out, "shape " + ShapeText(b) + " where the query has " + ShapeText(a)));
}

}  // namespace

void CheckShapes(const Capture& capture, CheckReport* report) {
  // The first event of a site and one in many of the others: a shape that breaks does so for good.
  constexpr size_t kLooks = 64;
  for (const std::string& name : capture.Names()) {
    const std::vector<EventId> ids = RealEvents(capture, name);
    std::map<int32_t, std::pair<EventId, std::vector<int64_t>>> first;  // by rank
    DType dtype = DType::kInvalid;                                      // of all ranks and steps
    const size_t stride = std::max<size_t>(1, ids.size() / kLooks);
    for (size_t i = 0; i < ids.size(); i += stride) {
      const auto info = capture.Info(ids[i]);
      const std::vector<int64_t> fixed = FixedExtents(*info);
      const auto [at, fresh] = first.emplace(info->event.rank, std::make_pair(ids[i], fixed));
      if (!fresh && at->second.second != fixed) {
        report->Found(Broken(*info, "shape " + ShapeText(info->event.shape) + " where an earlier step had " +
                                        ShapeText(capture.Info(at->second.first)->event.shape)));
        break;
      }
      if (i == 0) dtype = info->event.dtype;
      if (IsFloat(dtype) && IsFloat(info->event.dtype) && info->event.dtype != dtype) {
        const auto before = capture.Info(ids[0]);
        Suspicion s = Broken(*info, "dtype " + std::string(NameOf(info->event.dtype)) + " where step " +
                                        std::to_string(before->event.step) + " on rank " +
                                        std::to_string(before->event.rank) + " had " + std::string(NameOf(dtype)));
        s.bad.cls = fault_class::kPrecision;
        s.bad.bound_basis = "exact: dtypes";
        report->Found(std::move(s));
        break;
      }
      if (LiesOnItself(info->event) && info->audit == "after") {
        report->Found(Broken(*info, "strides " + ShapeText(info->event.strides) + " of shape " +
                                        ShapeText(info->event.shape) + " give two elements one address"));
        break;
      }
      if (info->site.stem == "attn.out") {
        JudgeHeads(capture, *info, report);
      } else if (!fixed.empty()) {
        report->Right(ids[i]);
      }
    }
  }
}

}  // namespace assay::check
