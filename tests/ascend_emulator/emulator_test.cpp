// What the emulator promises: right kernels run and give the same bytes whatever the grid and the
// schedule; wrong ones are rejected with a message that names the rule.
#include <cstdio>
#include <cstdlib>
#include <map>

#include "right_kernels.h"
#include "wrong_memory.h"
#include "wrong_vector.h"

namespace {

using ascend_emulator::memory;
using ascend_emulator::Options;
using ascend_emulator::Order;
using ascend_emulator::Violation;
using Bytes = std::vector<uint8_t>;

int failures = 0;
int checks = 0;

void check(bool holds, const std::string& promise) {
  ++checks;
  if (!holds) {
    ++failures;
    std::printf("FAILED: %s\n", promise.c_str());
  }
}

std::vector<Options> schedules(uint64_t seeds) {
  std::vector<Options> all;
  for (const Order order : {Order::kEager, Order::kLazy}) {
    Options options;
    options.order = order;
    all.push_back(options);
  }
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Options options;
    options.seed = seed;
    all.push_back(options);
  }
  return all;
}

// Runs `kernel` on every grid and schedule; its result must always be `expected`.
template <class Run>
void always_gives(const char* name, const Bytes& expected, Run run) {
  for (const uint32_t blocks : {1u, 3u, 40u, 48u}) {
    for (const Options& options : schedules(20)) {
      const std::string where = std::string(name) + " on " + std::to_string(blocks) +
                                " blocks, seed " + std::to_string(options.seed);
      try {
        check(run(blocks, options) == expected, where + " gives the expected bytes");
      } catch (const Violation& violation) {
        check(false, where + " is accepted: " + violation.what());
      }
      memory().free_all();
    }
  }
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
template <class T>
uint8_t* upload(const std::vector<T>& values) {
  return memory().upload(values.data(), values.size() * sizeof(T));
}

void test_add() {
  constexpr uint32_t kElements = 2048 * 5 + 77;
  std::vector<int32_t> x(kElements), y(kElements), z(kElements);
  for (uint32_t i = 0; i < kElements; ++i) {
    x[i] = static_cast<int32_t>(i * 7);
    y[i] = static_cast<int32_t>(1000000 - i);
    z[i] = x[i] + y[i];
  }
  always_gives("add", bytes_of(z), [&](uint32_t blocks, const Options& options) {
    uint8_t* to = memory().allocate(kElements * 4);
    EMU_LAUNCH(right_kernels::add, blocks, options, upload(x), upload(y), to, kElements);
    return memory().download(to, kElements * 4);
  });
}

struct KeepPositive {
  static constexpr uint32_t kTiles = 5;
  std::vector<half> x, y;

  KeepPositive() : x(kTiles * right_kernels::kTile), y(x.size(), half(0.0f)) {
    std::mt19937 random(3);
    for (half& value : x) {
      value = half(static_cast<float>(random() % 200) - 120.0f);
    }
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
      uint32_t kept = 0;
      half* to = &y[tile * right_kernels::kTile];
      for (uint32_t i = 0; i < right_kernels::kTile; i += 2) {
        const half value = x[tile * right_kernels::kTile + i];
        if (static_cast<float>(value) > 0.0f) {
          to[16 + kept++] = value;
        }
      }
      to[0] = half(static_cast<float>(kept));
    }
  }

  Bytes run(uint32_t blocks, const Options& options, bool broken) const {
    uint8_t* to = memory().allocate(y.size() * 2);
    EMU_LAUNCH(right_kernels::keep_positive, blocks, options, upload(x), to, kTiles, broken);
    return memory().download(to, y.size() * 2);
  }
};

void test_keep_positive() {
  const KeepPositive data;
  always_gives("keep_positive", bytes_of(data.y), [&](uint32_t blocks, const Options& options) {
    return data.run(blocks, options, false);
  });
}

// The second proof of Note [two proofs of order]: without the first, a missing edge costs bytes.
void test_missing_edge_corrupts() {
  const KeepPositive data;
  int corrupted = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Options options;
    options.seed = seed;
    options.report_hazards = false;
    corrupted += data.run(3, options, true) != bytes_of(data.y);
    memory().free_all();
  }
  check(corrupted > 0, "a missing flag corrupts bytes under some schedule of 20");
}

void test_clamp_to_bytes() {
  constexpr uint32_t kTiles = 6;
  std::vector<half> x(kTiles * 1024), y(x.size());
  Bytes z(x.size());
  std::mt19937 random(4);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = half(static_cast<float>(random() % 256));
    y[i] = half(static_cast<float>(random() % 256));
  }
  for (size_t group = 0; group < x.size(); group += 128) {
    float top = 0.5f;
    const auto chosen = [&](size_t i) {
      return static_cast<float>(x[i]) > static_cast<float>(y[i]) ? static_cast<float>(x[i]) : 0.5f;
    };
    for (size_t i = group; i < group + 128; ++i) top = std::max(top, chosen(i));
    for (size_t i = group; i < group + 128; ++i) {
      z[i] = static_cast<uint8_t>(std::nearbyint(top - chosen(i)));
    }
  }
  Bytes expected = z;
  const Bytes sums = bytes_of(std::vector<int32_t>(8, kTiles));
  expected.insert(expected.end(), sums.begin(), sums.end());
  always_gives("clamp_to_bytes", expected, [&](uint32_t blocks, const Options& options) {
    uint8_t* to = memory().allocate(z.size());
    uint8_t* total = upload(std::vector<int32_t>(8, 0));
    EMU_LAUNCH(right_kernels::clamp_to_bytes, blocks, options, upload(x), upload(y), to, total,
               kTiles);
    Bytes result = memory().download(to, z.size());
    const Bytes counted = memory().download(total, 32);
    result.insert(result.end(), counted.begin(), counted.end());
    return result;
  });
}

void test_transpose_and_reverse() {
  constexpr uint32_t kTiles = 7;
  std::vector<uint16_t> x(kTiles * 256), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i * 31);
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t from = 255 - i;
      y[tile * 256 + i] = x[tile * 256 + from % 16 * 16 + from / 16];
    }
  }
  always_gives("transpose_and_reverse", bytes_of(y), [&](uint32_t blocks, const Options& options) {
    uint8_t* to = memory().allocate(y.size() * 2);
    EMU_LAUNCH(right_kernels::transpose_and_reverse, blocks, options, upload(x), to, kTiles);
    return memory().download(to, y.size() * 2);
  });
}

void test_half_conversions() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    half value;
    value.bits = static_cast<uint16_t>(bits);
    const float wide = value;
    const bool nan = std::isnan(wide);
    if (!nan && half(wide).bits != bits) {
      check(false, "half " + std::to_string(bits) + " survives float");
      return;
    }
  }
  check(half(65519.0f).bits == 0x7bff, "65519 rounds to the greatest half");
  check(half(65520.0f).bits == 0x7c00, "65520 rounds to infinity");
  check(half(2049.0f).bits == half(2048.0f).bits, "ties go to even");
  check(half(std::ldexp(1.0f, -25)).bits == 0, "half of the least denormal rounds to 0");
  check(half(std::ldexp(1.5f, -25)).bits == 1, "more than half of it does not");
  check(bfloat16_t(1.00390625f).bits == 0x3f80, "bfloat16 ties go to even");
  using AscendC::RoundMode;
  check(ascend_emulator::convert<int16_t>(half(-2.5f), RoundMode::CAST_FLOOR) == -3, "floor");
  check(ascend_emulator::convert<int16_t>(half(-2.5f), RoundMode::CAST_TRUNC) == -2, "truncate");
  check(ascend_emulator::convert<int16_t>(half(2.5f), RoundMode::CAST_RINT) == 2, "to even");
  check(ascend_emulator::convert<int16_t>(half(2.5f), RoundMode::CAST_ROUND) == 3, "away from 0");
  check(ascend_emulator::convert<uint8_t>(half(300.0f), RoundMode::CAST_RINT) == 255, "saturate");
  check(ascend_emulator::convert<int16_t>(int32_t{70000}, RoundMode::CAST_NONE) == 32767,
        "saturate");
}

void test_wrong_kernels() {
  std::map<std::string, int> rules;
  for (const auto& rules_of : {wrong_kernels::memory_rules(), wrong_kernels::pipe_rules(),
                               wrong_kernels::vector_rules(), wrong_kernels::order_rules()}) {
    for (const auto& wrong : rules_of) {
      for (const Options& options : schedules(3)) {
        uint8_t* in = upload(Bytes(wrong_kernels::kBytes, 1));
        uint8_t* out = memory().allocate(wrong_kernels::kBytes);
        std::string said = "nothing";
        std::string rule;
        try {
          EMU_LAUNCH(wrong.run, wrong.blocks, options, in, out);
        } catch (const Violation& violation) {
          said = violation.what();
          rule = violation.rule();
        }
        check(rule == wrong.rule && said.find(wrong.message) != std::string::npos,
              std::string("a kernel that ") + wrong.name + " is rejected by rule '" + wrong.rule +
                  "' saying '" + wrong.message + "'; found: " + said);
        if (options.order == Order::kEager) {
          std::printf("%-58s %s\n", wrong.name, said.c_str());
        }
        ++rules[rule];
        memory().reset();
      }
    }
  }
  const auto launch_rule = [&](const char* what, const char* message, auto run) {
    try {
      run();
      check(false, std::string(what) + " is rejected");
    } catch (const Violation& violation) {
      check(violation.rule() == std::string("launch") &&
                std::string(violation.what()).find(message) != std::string::npos,
            std::string(what) + " is rejected by rule 'launch'; found: " + violation.what());
      ++rules[violation.rule()];
    }
  };
  launch_rule("a launch of no block", "0 blocks", [] { EMU_LAUNCH([] {}, 0, Options{}); });
  launch_rule("device code without a launch", "outside", [] { AscendC::GetBlockIdx(); });
  std::printf("rules: %zu\n", rules.size());
}

}  // namespace

int main() {
  test_half_conversions();
  test_wrong_kernels();
  test_add();
  test_keep_positive();
  test_missing_edge_corrupts();
  test_clamp_to_bytes();
  test_transpose_and_reverse();
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
