// The part of the backend that the bindings show, without torch headers: they are slow to compile
// and the bindings need none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace simdev {

void register_hooks();
std::pair<uint64_t, uint64_t> generator_state(int device);
void set_generator_state(int device, uint64_t seed, uint64_t offset);
// Asynchronous operators, blocking ones, and the blocking ones by name.
std::tuple<uint64_t, uint64_t, std::map<std::string, uint64_t>> operator_count_table();
size_t memo_size();
// What a stream answers to the question whether it captures a graph. It captures nothing: what is
// submitted is done as ever.
void set_capturing(int device, int stream, bool captures);

}  // namespace simdev
