// What must happen around fork(): a lock that another thread holds at that moment would stay locked in the child for
// ever. Guarded objects take their locks before the fork and give them back (parent) or make them anew (child).
// Nothing happens at vfork(), posix_spawn() and exec().
#pragma once

namespace assay {

class ForkGuarded {
 public:
  virtual void BeforeFork() = 0;
  virtual void AfterForkInParent() = 0;
  virtual void AfterForkInChild() = 0;

 protected:
  ~ForkGuarded() = default;
};

// Between these two calls the object takes part. Guard may throw std::bad_alloc. Thread-safe; not from inside the
// functions above.
void Guard(ForkGuarded* object);
void Unguard(ForkGuarded* object);

}  // namespace assay
