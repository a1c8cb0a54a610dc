// ProcessMark: whether this is still the process that made it, or one that was forked from it.
#pragma once

namespace memswap {

// Asked for each block and each piece of work: where the system wipes a page in forked children,
// that is a load, and no call of the system.
class ProcessMark {
 public:
  ProcessMark();
  ProcessMark(const ProcessMark&) = delete;
  ProcessMark& operator=(const ProcessMark&) = delete;
  ~ProcessMark();

  bool forked() const;

 private:
  // Holds 1 where it was made, and 0 in a child. NULL: the system wipes no page.
  const volatile char* page_ = nullptr;
  const int pid_;
};

}  // namespace memswap
