// The checks by name, for the registry: check/<name>.cpp defines each.
#pragma once

#include <memory>

#include "check/check.h"

namespace assay::check {

// Statistics alone, in one shared pass: each call makes a fresh check with no state of another run.
std::unique_ptr<ScanCheck> MakeNonfinite();
std::unique_ptr<ScanCheck> MakeSaturation();
std::unique_ptr<ScanCheck> MakeStaleRows();
std::unique_ptr<ScanCheck> MakeHeads();
std::unique_ptr<ScanCheck> MakeTokenLoops();

// Statistics of several ranks, shapes, addresses.
void CheckReplicas(const Capture& capture, CheckReport* report);
void CheckPartialSums(const Capture& capture, CheckReport* report);
void CheckShapes(const Capture& capture, CheckReport* report);
void CheckGraphs(const Capture& capture, CheckReport* report);

// Values.
void CheckUnwritten(const Capture& capture, CheckReport* report);
void CheckPool(const Capture& capture, CheckReport* report);
void CheckIds(const Capture& capture, CheckReport* report);
void CheckKvScale(const Capture& capture, CheckReport* report);
void CheckMoeCounts(const Capture& capture, CheckReport* report);
void CheckSpeculation(const Capture& capture, CheckReport* report);
void CheckRepeats(const Capture& capture, CheckReport* report);
void CheckSoftmaxSums(const Capture& capture, CheckReport* report);
void CheckEntropy(const Capture& capture, CheckReport* report);
void CheckLseRange(const Capture& capture, CheckReport* report);  // statistics suffice

}  // namespace assay::check
