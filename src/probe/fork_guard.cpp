#include "probe/fork_guard.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <vector>

namespace assay {
namespace {

// objects in order of registration; all their locks are taken in that order at a fork, and nowhere else is more than
// one recorder's lock held at once.
struct Guards {
  std::mutex mutex;
  std::vector<ForkGuarded*> objects;
};

// Never destroyed: a host may fork while static objects are being destroyed.
Guards& AllGuards() {
  alignas(Guards) static unsigned char storage[sizeof(Guards)];
  static Guards* guards = new (storage) Guards;
  return *guards;
}

// Holding the mutex from here to the end of Parent or Child keeps the list still.
void Prepare() {
  Guards& guards = AllGuards();
  guards.mutex.lock();
  for (ForkGuarded* object : guards.objects) object->BeforeFork();
}

void Parent() {
  Guards& guards = AllGuards();
  for (ForkGuarded* object : guards.objects) object->AfterForkInParent();
  guards.mutex.unlock();
}

// Last: the list's own lock, which this thread took in Prepare under another identity.
void Child() {
  Guards& guards = AllGuards();
  for (ForkGuarded* object : guards.objects) object->AfterForkInChild();
  new (&guards.mutex) std::mutex();
}

}  // namespace

void Guard(ForkGuarded* object) {
  Guards& guards = AllGuards();
  static const int registered = pthread_atfork(Prepare, Parent, Child);
  if (registered != 0) throw std::bad_alloc();  // ENOMEM, its only error
  std::lock_guard lock(guards.mutex);
  guards.objects.push_back(object);
}

void Unguard(ForkGuarded* object) {
  Guards& guards = AllGuards();
  std::lock_guard lock(guards.mutex);
  std::erase(guards.objects, object);
}

}  // namespace assay
