#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <random>
#include <vector>

#include "model/gemm.h"

namespace assay {
namespace {

// Holds every element against gamma(K) sum |x w|, both computed in __float128.
template <class T>
void ExpectWithinBound(int64_t m, int64_t n, int64_t k, bool accumulate, int pad) {
  std::mt19937_64 random(static_cast<uint64_t>(m * 1000003 + n * 1009 + k));
  std::normal_distribution<double> normal;
  const int64_t ldx = k + pad, ldw = k + 2 * pad, ldy = n + pad;
  std::vector<T> x(static_cast<size_t>(m * ldx)), w(static_cast<size_t>(n * ldw)), y(static_cast<size_t>(m * ldy));
  for (auto* v : {&x, &w, &y}) {
    for (T& e : *v) e = static_cast<T>(normal(random));
  }
  const std::vector<T> before = y;
  Linear(x.data(), ldx, w.data(), ldw, y.data(), ldy, m, n, k, accumulate);
  const __float128 u = std::numeric_limits<T>::epsilon() / 2, terms = static_cast<__float128>(k + 1) * u;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < ldy; ++c) {
      const size_t at = static_cast<size_t>(r * ldy + c);
      if (c >= n) {
        ASSERT_EQ(y[at], before[at]) << "between the rows, m " << m << " n " << n << " k " << k;
        continue;
      }
      __float128 exact = accumulate ? before[at] : 0, magnitude = exact < 0 ? -exact : exact;
      for (int64_t i = 0; i < k; ++i) {
        const __float128 p = static_cast<__float128>(x[static_cast<size_t>(r * ldx + i)]) *
                             static_cast<__float128>(w[static_cast<size_t>(c * ldw + i)]);
        exact += p;
        magnitude += p < 0 ? -p : p;
      }
      __float128 error = y[at] - exact;
      if (error < 0) error = -error;
      ASSERT_TRUE(error <= terms / (1 - terms) * magnitude)
          << "m " << m << " n " << n << " k " << k << " at (" << r << ", " << c << "): " << static_cast<double>(error);
    }
  }
}

TEST(Gemm, EveryElementIsWithinTheDerivedBound) {
  for (const int64_t m : {1, 2, 3, 5, 17}) {
    for (const int64_t n : {1, 2, 3, 4, 5, 8, 31}) {
      for (const int64_t k : {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257}) {
        for (const bool accumulate : {false, true}) {
          const int pad = static_cast<int>((m + n + k) % 3);
          ExpectWithinBound<float>(m, n, k, accumulate, pad);
          ExpectWithinBound<double>(m, n, k, accumulate, pad);
        }
      }
    }
  }
}

TEST(Gemm, LongSumsStayWithinTheBound) {
  ExpectWithinBound<float>(1, 3, 20000, false, 0);
  ExpectWithinBound<float>(4, 3, 20000, true, 1);
  ExpectWithinBound<double>(1, 3, 20000, true, 0);
}

TEST(Gemm, EmptySizesWriteZerosOrNothing) {
  float y[4] = {1, 2, 3, 4};
  Linear<float>(nullptr, nullptr, y, 0, 4, 3);
  Linear<float>(nullptr, nullptr, y, 2, 0, 3);
  EXPECT_EQ(y[0], 1);
  Linear<float>(nullptr, nullptr, y, 2, 2, 0, true);
  EXPECT_EQ(y[3], 4);
  Linear<float>(nullptr, nullptr, y, 2, 2, 0);
  EXPECT_EQ(y[0] + y[1] + y[2] + y[3], 0);
}

TEST(Gemm, NonFiniteInputsReachTheOutput) {
  for (const int64_t m : {1, 4}) {
    std::vector<float> x(static_cast<size_t>(m * 64), 1.0f), w(3 * 64, 0.0f), y(static_cast<size_t>(m * 3));
    x[40] = std::numeric_limits<float>::infinity();
    w[64 + 3] = std::nanf("");
    Linear(x.data(), w.data(), y.data(), m, 3, 64);
    EXPECT_TRUE(std::isnan(y[0])) << "inf * 0 in row 0";
    EXPECT_TRUE(std::isnan(y[1]));
    if (m > 1) {
      EXPECT_EQ(y[3], 0.0f);
      EXPECT_TRUE(std::isnan(y[4])) << "NaN weight";
    }
  }
}

TEST(Gemm, OneRowIsTheSameWhateverStandsBeside) {
  // Decode one request or one of several rows of a slice: the one-row path must not depend on neighbours.
  std::vector<float> x(64, 0.5f), w(5 * 64, 0.25f), a(5), b(5);
  Linear(x.data(), w.data(), a.data(), 1, 5, 64);
  Linear(x.data(), 64, w.data(), 64, b.data(), 5, 1, 5, 64);
  EXPECT_EQ(a, b);
}

// OpenBLAS would ask for its buffers in an endless loop. In a child, as the limit stays; it leaves 1 GiB to what there
// is, which under a sanitizer is much.
TEST(Gemm, ThreadsWhoseBuffersDoNotFitAreRefused) {
  if (GemmDescription().rfind("OpenBLAS", 0) != 0) GTEST_SKIP() << "built without OpenBLAS";
  const auto child = [] {
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    const rlim_t bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{1} << 30);
    const rlimit limit{bytes, bytes};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(2);
    const Status few = SetGemmThreads(1), many = SetGemmThreads(64);
    std::_Exit(!few.ok() ? 3 : many.code() != Code::kEnvironment ? 4 : 0);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
}

TEST(Gemm, SelfCheckPassesHere) {
  ASSERT_TRUE(SetGemmThreads(1).ok());
  const Status status = CheckGemm();
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(GemmDescription().empty());
}

}  // namespace
}  // namespace assay
