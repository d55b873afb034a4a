// Weighs one model of the actual array against chance: the inner half of Explain, shared by all kinds of fits.
#pragma once

#include <cstdint>
#include <vector>

#include "fit/explain.h"

namespace assay::fit {

// What an explanation predicts, element by element.
struct Model {
  std::vector<double> values;
  std::vector<double> bound;   // absolute; empty: that of the problem
  std::vector<uint8_t> known;  // 0: nothing is predicted there; empty: all known
  std::vector<uint8_t> hit;    // whether the prediction holds; empty: within slack times the bound
  int64_t free_parameters = 0;
  double price = 0;        // bits of the description: choices and parameters
  bool of_actual = false;  // speaks of actual alone (zero, constant, coarse): chance is judged by expected's values
  double chance = 0;       // of a hit by accident, where known; 0: measured
};

class Evidence {
 public:
  // The problem must outlive it and have been checked.
  Evidence(const Problem& problem, const Options& options);

  const Problem& problem() const { return problem_; }
  const Options& options() const { return options_; }
  int64_t size() const { return static_cast<int64_t>(problem_.actual.size()); }
  int64_t width() const { return problem_.heads * problem_.cols; }
  double expected(int64_t i) const { return problem_.expected[static_cast<size_t>(i)]; }
  double actual(int64_t i) const { return problem_.actual[static_cast<size_t>(i)]; }
  double bound(int64_t i) const {
    return problem_.bound.size() == 1 ? problem_.bound[0] : problem_.bound[static_cast<size_t>(i)];
  }
  bool wrong(int64_t i) const { return wrong_[static_cast<size_t>(i)] != 0; }
  int64_t wrong_count() const { return wrong_count_; }
  double residual() const { return residual_; }
  const std::vector<NamedNumber>& known_constants() const { return known_; }

  // x is what the model m says, within tolerance; the same kind of non-finite counts.
  static bool Meets(double x, double m, double tolerance);
  // A model that repeats expected, to be changed where the explanation differs.
  Model Unchanged() const;
  // Names the constant and adds its price: less for a known one.
  void AddConstant(double value, double uncertainty, Explanation* explanation, Model* model) const;
  // log2 of the number of ways to choose `chosen` of `all`, cheaper when they are one run.
  static double ChoiceBits(const std::vector<int64_t>& chosen, int64_t all);

  // Fills residual, support, significance and cost; true when the explanation counts.
  bool Judge(const Model& model, Explanation* explanation) const;

 private:
  // actual - values| / |actual| over elements that are known and finite in both; infinite when actual is zero there.
  double Residual(const std::vector<double>& values, const std::vector<uint8_t>& known) const;
  // 0 to 1, of one hit.
  double Chance(const Model& model, const std::vector<int64_t>& hits) const;
  // Absolute: slack times the model's bound, and the fitted roundoff where the model has a fitted constant.
  double ToleranceOf(const Model& model, int64_t i) const;

  const Problem& problem_;
  const Options& options_;
  // 1: beyond slack times the bound of expected, one an element.
  std::vector<uint8_t> wrong_;
  int64_t wrong_count_ = 0;
  double residual_ = 0;
  double noise_ = 0;  // relative size of the bounds
  std::vector<NamedNumber> known_;
};

}  // namespace assay::fit
