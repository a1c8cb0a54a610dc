// memswap_codec_ascend() on the emulator, against the CPU's scalar codec: frames of either decode
// on the other, for every grid and schedule; what does not fit goes to the arena; damaged frames
// hurt nobody.
#include <filesystem>
#include <random>

#include "golden_frames.h"
#include "harness.h"
#include "packed_bitmaps.h"

namespace memswap::test {
namespace {

constexpr Format kFormats[] = {
    {Dtype::kBf16, Layout::kDense},  {Dtype::kFp16, Layout::kDense},
    {Dtype::kFp32, Layout::kDense},  {Dtype::kFp64, Layout::kDense},
    {Dtype::kE4m3, Layout::kDense},  {Dtype::kE5m2, Layout::kDense},
    {Dtype::kFp32, Layout::kUpcast}, {Dtype::kBf16, Layout::kSparse},
    {Dtype::kFp16, Layout::kSparse}, {Dtype::kFp32, Layout::kSparse},
    {Dtype::kFp64, Layout::kSparse}, {Dtype::kE4m3, Layout::kSparse},
    {Dtype::kE5m2, Layout::kSparse}, {Dtype::kBool, Layout::kBits},
    {Dtype::kInt8, Layout::kInts},   {Dtype::kUint8, Layout::kInts},
    {Dtype::kInt16, Layout::kInts},  {Dtype::kUint16, Layout::kInts},
    {Dtype::kInt32, Layout::kInts},  {Dtype::kUint32, Layout::kInts},
    {Dtype::kInt64, Layout::kInts},  {Dtype::kUint64, Layout::kInts},
    {Dtype::kInt8, Layout::kRaw},    {Dtype::kBf16, Layout::kRaw},
    {Dtype::kInt32, Layout::kRaw},   {Dtype::kFp64, Layout::kRaw},
    {Dtype::kBf16, Layout::kInts},   {Dtype::kFp32, Layout::kInts},
};

// Repeats of 256 bytes that the vector unit takes for a block of 1024 elements, at most of
// test_cost's patterns: to measure and to code it when it is encoded, and to decode it. Of
// kFormats, in their order.
constexpr uint64_t kMostRepeats[][3] = {
    {501, 545, 684},    // bf16-dense
    {501, 601, 726},    // fp16-dense
    {594, 657, 948},    // fp32-dense
    {762, 917, 1397},   // fp64-dense
    {481, 561, 654},    // e4m3-dense
    {481, 593, 682},    // e5m2-dense
    {651, 101, 405},    // fp32-upcast
    {598, 717, 1162},   // bf16-sparse
    {535, 853, 1430},   // fp16-sparse
    {788, 884, 1580},   // fp32-sparse
    {1200, 889, 1968},  // fp64-sparse
    {475, 739, 1174},   // e4m3-sparse
    {499, 817, 1325},   // e5m2-sparse
    {84, 30, 94},       // bool-bits
    {75, 77, 121},      // int8-ints
    {75, 77, 121},      // uint8-ints
    {103, 69, 141},     // int16-ints
    {103, 69, 141},     // uint16-ints
    {207, 138, 344},    // int32-ints
    {207, 138, 344},    // uint32-ints
    {581, 398, 772},    // int64-ints
    {581, 398, 772},    // uint64-ints
    {44, 0, 44},        // int8-raw
    {84, 0, 84},        // bf16-raw
    {167, 0, 167},      // int32-raw
    {333, 0, 333},      // fp64-raw
    {103, 35, 85},      // bf16-ints
    {207, 104, 168},    // fp32-ints
};
static_assert(std::size(kMostRepeats) == std::size(kFormats));

// A sparse tensor with everything in it for sparse frames, mixed blocks for all others.
Data sample(const Format& format, uint64_t elements, uint64_t seed = 1) {
  if (format.layout == Layout::kSparse) {
    return make({Kind::kSignedSparse, 8}, format.dtype, seed, elements);
  }
  const Pattern upcast{Kind::kUpcastOutliers, 6};
  return make(format.layout == Layout::kUpcast ? upcast : Pattern{Kind::kMixed, 0}, format.dtype,
              seed, elements);
}

// Data whose payloads are as long as they get.
Data incompressible(const Format& format, uint64_t elements, uint64_t seed = 5) {
  return make({Kind::kRandomBits, 0}, format.dtype, seed, elements);
}

// Sparse blocks at the edge of a literal one, in pairs: the last that is shorter, and the first
// that is not. An element of float64 takes more than a unit, so one pair need not touch the edge.
Data around_literal(const Format& format) {
  const uint32_t longest = format.width() * frame::kBlockElements / frame::kUnitBytes;
  Data blocks;
  bool shortest_gain = false;
  uint64_t survivors = 4;
  for (uint64_t seed = 5; seed < 10; ++seed) {
    const Data random = incompressible(format, frame::kBlockElements, seed);
    const auto block = [&] {
      Data data = random;
      std::fill(data.begin() + static_cast<ptrdiff_t>(survivors * format.width()), data.end(), 0);
      return data;
    };
    const auto coded = [&] {
      frame::Record record;
      memcpy(&record, cpu_encode(format, block()).begin + frame::kHeaderBytes, sizeof(record));
      return record.block[0];
    };
    while (frame::Record::mode(coded()) != frame::kLiteral) {
      ++survivors;
    }
    while (frame::Record::mode(coded()) == frame::kLiteral) {
      --survivors;
    }
    shortest_gain |= frame::Record::units(coded()) == longest - 1;
    for (int i = 0; i < 2; ++i, ++survivors) {
      const Data next = block();
      blocks.insert(blocks.end(), next.begin(), next.end());
    }
  }
  check(shortest_gain, format.name() + ": one of the blocks is a single unit shorter than literal");
  return blocks;
}

Data read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Data(std::istreambuf_iterator<char>(file), {});
}

Frame frame_of(const uint8_t* bytes, uint64_t count) {
  Frame frame(count);
  memcpy(frame.begin, bytes, count);
  return frame;
}

void test_golden(const std::string& folder) {
  for (const GoldenFrame& golden : kGoldenFrames) {
    guarded(golden.name, [&] {
      const Format format{golden.dtype, golden.layout};
      const Data data = make(golden.pattern, golden.dtype, golden.seed, golden.elements);
      const Data file = read_file(folder + "/golden/" + golden.name + ".msf");
      check(!file.empty(), std::string(golden.name) + " is there");
      const Frame frame = frame_of(file.data(), file.size());
      check_decodes(format, frame, data, {}, std::string(golden.name) + ", committed");
      Run run;
      run.fast = golden.fast;
      run.center = golden.center;
      const Frame own =
          ascend_encode(format, data, format.sections(golden.elements).max_var_units(), run);
      check(own.code == 0 && own.header().status == frame::kOk,
            std::string(golden.name) + " is encoded");
      check_decodes(format, own, data, {}, std::string(golden.name) + ", by the kernels");
      check(portable(own) == file,
            std::string(golden.name) + ": the kernels write the committed bytes");
    });
  }
}

void test_patterns(const Format& format) {
  std::vector<Data> tensors;
  for (const uint64_t elements : {0, 1, 1023, 1024, 8193}) {
    tensors.push_back(sample(format, elements));
  }
  // A block of each of the kinds that reach each mode, and a tail.
  tensors.push_back(
      make({Kind::kMixed, 0}, format.dtype, 3, uint64_t{kMixedPatterns} * 1024 - 700));
  if (format.layout == Layout::kDense || format.layout == Layout::kSparse) {
    for (const Pattern& outliers : {Pattern{Kind::kSpikes, 10}, Pattern{Kind::kSpikes, 2},
                                    Pattern{Kind::kChannels, 64}, Pattern{Kind::kChannels, 2}}) {
      tensors.push_back(make(outliers, format.dtype, 4, 9 * 1024 - 5));
    }
  }
  if (format.has_bitmaps()) {
    // Lengths at the edge of packing, and blocks that are all zeros.
    for (const Pattern& zeros : {Pattern{Kind::kMixedBytes, 95}, Pattern{Kind::kMixedBytes, 96},
                                 Pattern{Kind::kMixedBytes, 0}, Pattern{Kind::kCausal, 5}}) {
      tensors.push_back(make(zeros, format.dtype, 2, 3 * 1024 - 5));
    }
  }
  if (format.layout == Layout::kSparse) {
    tensors.push_back(around_literal(format));
  }
  for (const Data& data : tensors) {
    const uint64_t elements = data.size() / format.width();
    const std::string what = format.name() + " of " + std::to_string(elements);
    const Frame own = ascend_encode(format, data, format.sections(elements).max_var_units());
    check(own.code == 0 && own.header().status == frame::kOk, what + ": the worst case is enough");
    check_decodes(format, own, data, {}, what + " by the kernels");
    const Frame canonical = cpu_encode(format, data);
    check_decodes(format, canonical, data, {}, what + " by the CPU");
    check(bytes_of(canonical) == bytes_of(own), what + ": frames are the CPU's, byte by byte");
    for (const uint8_t center : {uint8_t{128}, uint8_t{3}}) {
      Run run;
      run.fast = format.has_profiles();
      run.center = center;
      if (!run.fast) {
        break;
      }
      const Frame fast = cpu_encode(format, data, run);
      check_decodes(format, fast, data, {}, what + " by the fast profile");
      check(bytes_of(fast) == bytes_of(ascend_encode(
                                  format, data, format.sections(elements).max_var_units(), run)),
            what + ": frames of the fast profile are the CPU's, byte by byte");
    }
  }
}

// 48 tiles and a part of one would take long for each format; four tiles leave most cores idle,
// which is a case as well.
// `seeds`: schedules of the pipes on each grid; 0: a few.
void test_schedules(const Format& format, uint64_t seeds = 0) {
  const uint64_t elements = 3 * frame::kTileElements + 1500;
  const Data data = sample(format, elements);
  const uint64_t capacity = format.sections(elements).max_var_units();
  Data reference;
  for (const uint32_t cores : {1u, 3u, 40u, 48u}) {
    const uint64_t count = seeds != 0 ? seeds : cores == 3 ? 4 : 1;
    for (uint64_t seed = 0; seed < count; ++seed) {
      Run run;
      run.cores = cores;
      run.options.seed = seed * 77 + cores;
      const Frame frame = ascend_encode(format, data, capacity, run);
      const Data bytes = bytes_of(frame);
      reference = reference.empty() ? bytes : reference;
      const std::string what = format.name() + " on " + std::to_string(cores) + " cores, seed " +
                               std::to_string(run.options.seed);
      check(bytes == reference, what + ": the frame is the same");
      check(frame.header().var_used == payload_units(format, frame),
            what + ": nothing is between the payloads");
      Data output(data.size());
      check(ascend_decode(format, frame, &output, run) == frame::kOk && output == data,
            what + ": decodes");
    }
  }
}

void test_every_core_has_tiles() {
  const Format format{Dtype::kBf16, Layout::kDense};
  const uint64_t elements = 50 * frame::kTileElements - 77;
  const Data data = make({Kind::kNormal, 0}, format.dtype, 1, elements);
  Data reference;
  for (const uint32_t cores : {1u, 3u, 40u, 48u}) {
    Run run;
    run.cores = cores;
    const Frame frame = ascend_encode(format, data, format.sections(elements).max_var_units(), run);
    const Data bytes = bytes_of(frame);
    reference = reference.empty() ? bytes : reference;
    check(bytes == reference, "50 tiles on " + std::to_string(cores) + " cores: the same frame");
    const Header header = frame.header();
    check(header.var_used == payload_units(format, frame) && (header.flags & frame::kOrdered) != 0,
          "50 tiles on " + std::to_string(cores) + " cores: nothing is between the payloads");
    check(format.sections(elements).bytes(header.var_used) * 10 < data.size() * 7,
          "50 tiles on " + std::to_string(cores) + " cores: the frame is short");
    Data output(data.size());
    check(ascend_decode(format, frame, &output, run) == frame::kOk && output == data,
          "50 tiles on " + std::to_string(cores) + " cores: decode");
  }
}

// Payloads that do not fit var go to the arena, one behind another, and its cursor says how far.
void test_overflow(const Format& format) {
  const uint64_t elements = 3 * frame::kTileElements + 300;
  const Sections sections = format.sections(elements);
  if (sections.max_payload_units == 0) {
    return;
  }
  const uint64_t most = sections.max_var_units();
  const uint64_t tile = uint64_t{frame::kTileBlocks} * sections.max_payload_units;
  for (const bool longest : {false, true}) {
    const Data data = longest ? incompressible(format, elements) : sample(format, elements);
    const Data reference = portable(ascend_encode(format, data, most));
    for (const uint64_t capacity : {uint64_t{0}, most / 5, most - tile / 2}) {
      Run run;
      run.cursor = 3;
      // As the host sets it aside.
      const uint64_t reserve =
          std::min(most, most - capacity + memswap_codec_ascend()->spare_tiles * tile);
      run.overflow_capacity = run.cursor + reserve;
      const std::string what = format.name() + (longest ? ", random bits" : "") + ", var of " +
                               std::to_string(capacity) + " of " + std::to_string(most) + " units";
      const Frame frame = ascend_encode(format, data, capacity, run);
      const Header header = frame.header();
      check(frame.code == 0 && header.status == frame::kOk, what + ": the reserve is enough");
      check(frame.cursor == run.cursor + header.overflow_used,
            what + ": the cursor moved by what the frame took");
      check(header.var_used + header.overflow_used == payload_units(format, frame) &&
                ((header.flags & frame::kOrdered) != 0) == (header.overflow_used == 0),
            what + ": nothing is between the payloads");
      run.cores = 1;
      const Frame by_one = ascend_encode(format, data, capacity, run);
      run.cores = 3;
      const uint64_t used =
          sections.bytes(header.var_used);  // behind it are parts of what overflowed
      check(memcmp(by_one.begin, frame.begin, used) == 0 && by_one.overflow == frame.overflow,
            what + ": one core puts them into the same places");
      check(portable(frame) == reference, what + ": the blocks are the same");
      check_decodes(format, frame, data, run, what);
    }
  }
  const Data data = incompressible(format, elements);
  for (const uint64_t arena : {uint64_t{0}, most / 2}) {
    Run run;
    run.overflow_capacity = arena;
    const Frame frame = ascend_encode(format, data, most / 4, run);
    check(frame.code == 0 && frame.header().status == frame::kNoRoom &&
              frame.header().overflow_used == 0 && frame.cursor == 0,
          format.name() + ": an arena of " + std::to_string(arena) + " units is too small");
  }
}

constexpr int64_t kEveryBit = frame::kNoRoom | frame::kBadHeader | frame::kBadRecord |
                              frame::kBadPayload | frame::kBadChecksum;

// Many cores that find the same error do not make it another one.
void test_errors_of_many_cores() {
  const Format format{Dtype::kBf16, Layout::kDense};
  const Data data = sample(format, 5 * frame::kTileElements);
  const Frame frame = cpu_encode(format, data);
  const Sections sections = format.sections(5 * frame::kTileElements);
  for (uint32_t tile = 0; tile < 5; ++tile) {
    frame.begin[sections.records + tile * frame::kRecordBytes + 28] ^= 1;  // its checksum
  }
  Run run;
  run.cores = 5;
  Data output(data.size());
  check(ascend_decode(format, frame, &output, run) == frame::kBadChecksum,
        "five cores with a wrong checksum each report a wrong checksum");
}

// Whatever is damaged, the decoder stays within its buffers (the emulator checks) and says so,
// unless nothing changed for the CPU either.
void check_hostile(const Frame& frame, bool verify, const std::string& what) {
  const Header header = frame.header();
  if (header.elements > 100000 || !frame::is_dtype(header.dtype)) {
    return;  // refused before any kernel
  }
  const Format format{static_cast<Dtype>(header.dtype), Layout::kRaw};
  Data expected(header.elements * format.width());
  Data output(expected.size());
  const uint32_t cpu = cpu_decode(format, frame, &expected, verify);
  try {
    Run run;
    run.cores = 2;
    const int64_t status = ascend_decode(format, frame, &output, run, verify);
    check((status == 0) == (cpu == 0), what + " is reported as by the CPU, " +
                                           std::to_string(status) + " and " + std::to_string(cpu));
    check(status != 0 || output == expected, what + " never gives other data than the CPU");
    check(status >= 0 && status <= kEveryBit, what + " is told by bits that have a meaning");
  } catch (const Violation& violation) {
    device().reset();
    check(false, what + " stays in bounds: " + violation.what());
  }
}

// A barrier that is left out of a kernel is noticed, unless another orders the same operations. The
// sample is spread over the first tiles and reaches every part of a coder and a reader.
void test_missing_barriers(const Format& format) {
  const Data data = sample(format, 3 * frame::kTileElements);
  const uint64_t capacity = format.sections(3 * frame::kTileElements).max_var_units();
  const Frame good = cpu_encode(format, data);
  constexpr int kSamples = 24;
  for (const bool encodes : {true, false}) {
    int noticed = 0;
    for (int i = 0; i < kSamples; ++i) {
      Run run;
      run.cores = 1;
      run.options.skipped_barrier = 3 + i * 9;
      try {
        Data output(data.size());
        encodes ? void(ascend_encode(format, data, capacity, run))
                : void(ascend_decode(format, good, &output, run));
      } catch (const Violation& violation) {
        device().reset();
        noticed += violation.rule() == "hazard" ? 1 : 0;
      }
    }
    std::printf("%s: %d of %d missing barriers of the %s\n", format.name().c_str(), noticed,
                kSamples, encodes ? "encoder" : "decoder");
    check(3 * noticed >= 2 * kSamples, format.name() + ": missing barriers are noticed");
  }
}

// What the machine is good at, whatever the data: moves of 16 KiB, the next one under way while one
// is worked on, and a scalar unit that has a few numbers per block to read, not one per element.
// And no more of the vector unit's work than is known.
void test_cost(const Format& format, const uint64_t (&most_repeats)[3]) {
  constexpr uint64_t kTiles = 4;
  constexpr uint64_t kMoveBytes = 16 * 1024;
  const uint64_t elements = kTiles * frame::kTileElements;
  const uint64_t blocks = kTiles * frame::kTileBlocks;
  const uint64_t capacity = format.sections(elements).max_var_units();
  const uint64_t moves = elements * format.width() / kMoveBytes;
  // Of the records, the statistics, and the checksum.
  constexpr uint64_t kMostPerBlock = 40;
  uint64_t fewest = ~uint64_t{0};
  uint64_t most = 0;
  uint64_t unified = 0;
  uint64_t repeats[3] = {};  // to measure, to code, to decode
  for (const Pattern& pattern : {Pattern{Kind::kNormal, 0}, Pattern{Kind::kRandomBits, 0},
                                 Pattern{Kind::kSignedSparse, 2}, Pattern{Kind::kMixedBytes, 40}}) {
    const Data data = make(pattern, format.dtype, 1, elements);
    const std::string what = format.name() + ", pattern " + std::to_string(int(pattern.kind));
    ascend_emulator::Tally encode, decode;
    Run run;
    run.cores = 1;
    run.options.tally = &encode;
    ascend_encode(format, data, capacity, run);
    check(encode.longest_load == kMoveBytes,
          what + ": the encoder loads " + std::to_string(encode.longest_load) + " bytes at a time");
    check(encode.ahead >= moves - 1, what + ": the encoder loads ahead");
    const std::string& encoder = machine().launches.back().first;
    check(encode.unified_bytes == ascend_emulator::encoder_unified_bytes(encoder),
          what + ": the compiler knows how much of UB the encoder takes");
    Data output(data.size());
    run.options.tally = &decode;
    ascend_decode(format, cpu_encode(format, data), &output, run);
    check(output == data, what + ": decodes");
    const std::string& decoder = machine().launches.back().first;
    check(decode.unified_bytes ==
              ascend_emulator::decoder_unified_bytes(decoder, static_cast<uint32_t>(format.layout)),
          what + ": the compiler knows how much of UB the decoder takes");
    check(
        decode.longest_store == kMoveBytes,
        what + ": the decoder stores " + std::to_string(decode.longest_store) + " bytes at a time");
    check(decode.ahead >= moves - 1, what + ": the decoder loads ahead");
    for (const uint64_t accesses : {encode.scalar_accesses, decode.scalar_accesses}) {
      check(accesses <= kMostPerBlock * blocks, what + ": the scalar unit accesses memory " +
                                                    std::to_string(accesses / blocks) +
                                                    " times per block of 1024");
      fewest = std::min(fewest, accesses / blocks);
      most = std::max(most, accesses / blocks);
    }
    unified = std::max({unified, encode.unified_bytes, decode.unified_bytes});
    // Of the encoder's launches the second measures, the fourth codes.
    const std::vector<uint64_t>& of = encode.vector_repeats;
    const uint64_t these[3] = {of[1] / blocks, of.size() > 3 ? of[3] / blocks : 0,
                               decode.vector_repeats[0] / blocks};
    if (pattern.kind == Kind::kNormal) {
      std::printf(
          "%s: of N(0, 1), %llu, %llu and %llu vector repeats per block to measure, to code "
          "and to decode\n",
          format.name().c_str(), static_cast<unsigned long long>(these[0]),
          static_cast<unsigned long long>(these[1]), static_cast<unsigned long long>(these[2]));
    }
    for (uint32_t i = 0; i < 3; ++i) {
      repeats[i] = std::max(repeats[i], these[i]);
    }
  }
  std::printf(
      "%s: {%llu, %llu, %llu} vector repeats at most, %llu to %llu scalar accesses per block, "
      "%.1f KiB of UB\n",
      format.name().c_str(), static_cast<unsigned long long>(repeats[0]),
      static_cast<unsigned long long>(repeats[1]), static_cast<unsigned long long>(repeats[2]),
      static_cast<unsigned long long>(fewest), static_cast<unsigned long long>(most),
      static_cast<double>(unified) / 1024);
  // Equal, so that what takes less is written down as well.
  check(std::equal(repeats, repeats + 3, most_repeats),
        format.name() + ": the vector unit has as much to do as kMostRepeats says");
}

// The fuzzer's frames as they are, and each with bytes changed.
void test_corpus(const std::string& folder, uint32_t rounds) {
  uint32_t frames = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/corpus")) {
    const std::string name = entry.path().filename();
    const Data file = read_file(entry.path());
    if (name.rfind("frame-", 0) != 0 || file.size() < 2 + frame::kHeaderBytes || file[1] != 0) {
      continue;
    }
    ++frames;
    const Frame good = frame_of(file.data() + 2, file.size() - 2);
    check_hostile(good, true, name);
    std::mt19937_64 random(7);
    const Header header = good.header();
    const Sections sections = frame::sections_of(
        static_cast<Dtype>(header.dtype), static_cast<Layout>(header.layout), header.elements);
    for (uint32_t round = 0; round < rounds; ++round) {
      Frame frame(good);
      // The header, the records, the rest.
      const uint64_t begin = round % 4 == 0 ? 0 : sections.records;
      const uint64_t end = round % 4 == 0   ? frame::kHeaderBytes
                           : round % 4 == 1 ? sections.var
                                            : frame.bytes;
      const uint64_t target = begin == end ? 0 : begin + random() % (end - begin);
      frame.begin[target] ^= static_cast<uint8_t>(1 + random() % 255);
      check_hostile(frame, round % 3 == 0, name + ": damage at byte " + std::to_string(target));
    }
  }
  check(frames >= 15, "the corpus has frames");
}

}  // namespace
}  // namespace memswap::test

// Arguments: kernels/tests, then what to run: golden, corpus, cores, barriers, cost,
// bitmaps, seeds, or formats.
int main(int argc, char** argv) {
  using namespace memswap::test;
  const std::string folder = argc > 1 ? argv[1] : ".";
  for (int i = 2; i < argc; ++i) {
    const std::string wanted = argv[i];
    if (wanted == "golden") {
      test_golden(folder);
    } else if (wanted == "corpus") {
      test_corpus(folder, 24);
    } else if (wanted == "barriers") {
      for (const Layout layout : {Layout::kDense, Layout::kSparse}) {
        test_missing_barriers({Dtype::kBf16, layout});
        test_missing_barriers({Dtype::kFp64, layout});
      }
      test_missing_barriers({Dtype::kFp32, Layout::kUpcast});
      test_missing_barriers({Dtype::kInt64, Layout::kInts});
      test_missing_barriers({Dtype::kBool, Layout::kBits});
    } else if (wanted == "cores") {
      guarded("many cores", [] { test_every_core_has_tiles(); });
      guarded("errors of many cores", [] { test_errors_of_many_cores(); });
    }
    for (const Format& format : kFormats) {
      if (wanted == "cost") {
        guarded(format.name(), [&] { test_cost(format, kMostRepeats[&format - kFormats]); });
      }
      if (wanted == "bitmaps") {
        guarded(format.name(), [&] {
          format.has_bitmaps() ? test_packed_bitmaps(format) : test_packed_without_bitmaps(format);
        });
      }
      if (wanted == "seeds") {
        guarded(format.name(), [&] { test_schedules(format, 20); });
      }
      if (wanted == format.name() || wanted == "all") {
        guarded(format.name(), [&] {
          test_patterns(format);
          test_schedules(format);
          test_overflow(format);
        });
      }
    }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
