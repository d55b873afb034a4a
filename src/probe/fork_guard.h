// What must happen around fork(): a lock that another thread holds at that moment would stay locked in the child for
// ever. Guarded objects take their locks before the fork and give them back (parent) or make them anew (child).
// Nothing happens at vfork(), posix_spawn() and exec().
#pragma once

namespace assay {

class ForkGuarded {
 public:
  // In the parent, in the thread that forks: take every lock of the object.
  virtual void BeforeFork() = 0;
  // Give them back.
  virtual void AfterForkInParent() = 0;
  // Only this thread exists here: make the locks anew (they are held by a thread of another process) and drop what is
  // the parent's.
  virtual void AfterForkInChild() = 0;

 protected:
  // Not virtual: nobody owns objects through this interface.
  ~ForkGuarded() = default;
};

// Between these two calls the object takes part. Guard may throw std::bad_alloc. Thread-safe; not from inside the
// functions above.
void Guard(ForkGuarded* object);
void Unguard(ForkGuarded* object);

}  // namespace assay
