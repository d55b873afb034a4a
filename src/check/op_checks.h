// The checks of single operations by name, for the registry: check/op_<operation>.cpp defines each. All of them need
// payloads of the operands (docs/adding-a-case.md, "What each operation needs").
#pragma once

#include <span>

#include "check/check.h"

namespace assay::check {

std::span<const CheckDef> OperationChecks();

void JudgeAttention(const Capture& capture, CheckReport* report);
void JudgeChunks(const Capture& capture, CheckReport* report);
void JudgeRope(const Capture& capture, CheckReport* report);
void JudgeBroadcast(const Capture& capture, CheckReport* report);
void JudgeValues(const Capture& capture, CheckReport* report);
void JudgeNorms(const Capture& capture, CheckReport* report);
void JudgeLinear(const Capture& capture, CheckReport* report);
void JudgeAbsorption(const Capture& capture, CheckReport* report);
void JudgeAbsorbedWeights(const Capture& capture, CheckReport* report);  // the part of it at load
void JudgeRouter(const Capture& capture, CheckReport* report);
void JudgeExperts(const Capture& capture, CheckReport* report);
void JudgeSums(const Capture& capture, CheckReport* report);
void JudgeResidual(const Capture& capture, CheckReport* report);
void JudgeCacheWrite(const Capture& capture, CheckReport* report);
void JudgeCacheRead(const Capture& capture, CheckReport* report);
void JudgeQuantisedInputs(const Capture& capture, CheckReport* report);
void JudgeEffectiveWeights(const Capture& capture, CheckReport* report);
void JudgeHead(const Capture& capture, CheckReport* report);
void JudgeSampling(const Capture& capture, CheckReport* report);
void JudgeDeclared(const Capture& capture, CheckReport* report);

}  // namespace assay::check
