#include "host_limits.h"

#include <linux/capability.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace memswap {
namespace {

using std::filesystem::path;

constexpr size_t kKiB = 1024;
// Version 1 says "no limit" with a number as large as there is.
constexpr size_t kNoLimit = size_t{1} << 60;

// The names of a group's files, by version.
struct Version {
  const char* limit;
  const char* used;
  std::vector<const char*> cached;  // lines of memory.stat
};
const Version kFirst{
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
const Version kSecond{"memory.max", "memory.current", {"inactive_file", "active_file"}};

std::optional<size_t> number_in(const path& file) {
  std::ifstream stream(file);
  size_t found = 0;
  return stream >> found ? std::optional(found) : std::nullopt;  // "max" is no number
}

// "name value" lines, or "Name: value", as numbers.
std::map<std::string, size_t> numbers_in(const path& file, int base = 10) {
  std::map<std::string, size_t> found;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string name;
    std::string value;
    if (!(words >> name >> value)) {
      continue;
    }
    if (name.ends_with(':')) {
      name.pop_back();
    }
    try {
      found[name] = std::stoull(value, nullptr, base);
    } catch (const std::exception&) {
      // a line of words
    }
  }
  return found;
}

void look_at_group(const path& folder, const Version& version, HostLimits& limits) {
  const auto limit = number_in(folder / version.limit);
  const auto used = number_in(folder / version.used);
  if (!limit || !used || *limit >= kNoLimit) {
    return;  // no such group here (a container sees its own one as the root), or no limit
  }
  const auto parts = numbers_in(folder / "memory.stat");
  size_t cached = 0;
  for (const char* name : version.cached) {
    const auto part = parts.find(name);
    cached += part == parts.end() ? 0 : part->second;
  }
  const size_t held = *used - std::min(*used, cached);
  const size_t left = *limit - std::min(*limit, held);
  if (!limits.group || left < *limits.group) {
    limits.group = left;
    limits.group_total = *limit;
  }
}

// Whether a list of controllers ("cpu,memory") has that of memory.
bool has_memory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

void look_at_groups(const path& root, HostLimits& limits) {
  const path top_of_second = root / "sys/fs/cgroup";
  const path top_of_first = top_of_second / "memory";
  look_at_group(top_of_second, kSecond, limits);
  look_at_group(top_of_first, kFirst, limits);
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:/path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !has_memory(controllers)) {
      continue;
    }
    const path& top = controllers.empty() ? top_of_second : top_of_first;
    const Version& version = controllers.empty() ? kSecond : kFirst;
    path folder = top;
    for (const path& part : path(line.substr(second + 1)).relative_path()) {
      folder /= part;
      look_at_group(folder, version, limits);
    }
  }
}

std::optional<size_t> lockable(const path& root) {
  const auto capabilities = numbers_in(root / "proc/self/status", 16);
  const auto effective = capabilities.find("CapEff");
  if (effective != capabilities.end() && ((effective->second >> CAP_IPC_LOCK) & 1) != 0) {
    return std::nullopt;
  }
  const std::string title = "Max locked memory";
  std::ifstream limits(root / "proc/self/limits");
  for (std::string line; std::getline(limits, line);) {
    if (line.starts_with(title)) {
      std::istringstream words(line.substr(title.size()));
      size_t soft = 0;
      return words >> soft ? std::optional(soft) : std::nullopt;  // "unlimited" is no number
    }
  }
  return std::nullopt;
}

}  // namespace

size_t HostLimits::free() const { return std::min(available, group.value_or(kNone)); }

size_t HostLimits::whole() const { return std::min(total, group_total); }

HostLimits host_limits(const path& root) {
  HostLimits limits;
  const auto memory = numbers_in(root / "proc/meminfo");
  for (const auto& [name, field] :
       {std::pair{"MemAvailable", &limits.available}, {"MemTotal", &limits.total}}) {
    const auto line = memory.find(name);
    if (line != memory.end()) {
      *field = line->second * kKiB;
    }
  }
  if (limits.available == HostLimits::kNone) {  // pages that are free have to do
    limits.available =
        static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  }
  look_at_groups(root, limits);
  limits.lockable = lockable(root);
  const auto status = numbers_in(root / "proc/self/status");
  for (const char* name : {"VmLck", "VmPin"}) {
    const auto line = status.find(name);
    limits.locked += line == status.end() ? 0 : line->second * kKiB;
  }
  return limits;
}

}  // namespace memswap
