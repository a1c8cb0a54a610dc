// ProcessMark: whether this is still the process that made it, or one that was forked from it.
#pragma once

namespace memswap {

// Asked for each block and each piece of work: where the system wipes a page in forked children,
// that is a load, and no call of the system (getpid: 0.25 us).
class ProcessMark {
 public:
  ProcessMark();
  ProcessMark(const ProcessMark&) = delete;
  ProcessMark& operator=(const ProcessMark&) = delete;
  ~ProcessMark();

  bool forked() const;

 private:
  const volatile char* page_ =
      nullptr;  // 1 where it was made, wiped in a child; NULL: no such page
  const int pid_;
};

}  // namespace memswap
