// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"fmt"
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/model/family"
)

// splitFamilies returns the families for which SGLang splits a step into two micro-batches. With any other family, its
// scheduler raises NotImplementedError at the first batch that it splits.
func splitFamilies() []string {
	return slices.DeleteFunc(family.Types(), func(modelType string) bool { return of(modelType).MicroBatches == "" })
}

// checkOverlap checks the requirements of --enable-two-batch-overlap and --deepep-config. An unknown model type excludes
// nothing.
func checkOverlap(s engine.Situation) error {
	o := s.Launch.Overlap
	backend, _ := engine.FlagValue(s.UserArgs, "--moe-a2a-backend")
	mode, _ := engine.FlagValue(s.UserArgs, "--deepep-mode")
	first := of(s.Family).MicroBatches
	switch {
	case o.DecodeThresholdTokens > 0:
		return engine.RefuseOverlap("SGLang", "decodeThresholdTokens", "")
	case o.PrefillThresholdTokens > 0:
		return engine.RefuseOverlap("SGLang", "prefillThresholdTokens", "")
	case o.MicroBatches > 2:
		return fmt.Errorf("%s.microBatches: %d: SGLang supports exactly 2 micro-batches; use 2", engine.OverlapField, o.MicroBatches)
	case o.MicroBatches > 0 && family.Lookup(s.Family) != nil && first == "":
		return fmt.Errorf("%s.microBatches: SGLang does not support micro-batches for models of type %q, only for %s: remove the field",
			engine.OverlapField, s.Family, strings.Join(splitFamilies(), ", "))
	case o.MicroBatches > 0 && s.Release.Before(engine.ParseRelease(first)):
		return fmt.Errorf("%s.microBatches: SGLang %s does not support micro-batches for models of type %q: use %s or newer, or remove the field", engine.OverlapField, s.Release, s.Family, first)
	case o.CommunicationSMs > 0 && backend != "deepep" && of(s.Family).MapWithoutEffect:
		return fmt.Errorf("%s.communicationSMs: it configures DeepEP, and the checked releases of SGLang cannot run %s models with deepep: remove the field", engine.OverlapField, s.Family)
	case backend == "" || backend == "none":
		return fmt.Errorf("%s: without an all-to-all backend there is no exchange to overlap: set --moe-a2a-backend in spec.engine.args, for example to deepep, or remove the field", engine.OverlapField)
	case o.CommunicationSMs > 0 && backend != "deepep":
		return fmt.Errorf("%s.communicationSMs: it configures DeepEP, and --moe-a2a-backend in spec.engine.args is %s: use deepep, or remove the field", engine.OverlapField, backend)
	case o.CommunicationSMs > 0 && mode == "low_latency":
		return fmt.Errorf("%s.communicationSMs: DeepEP does not accept a number of multiprocessors with --deepep-mode low_latency: use normal or auto in spec.engine.args, or remove the field", engine.OverlapField)
	}
	return nil
}

// overlapFlags returns only the flags for the members that are set.
func overlapFlags(o semmoev1.OverlapSpec) []engine.Flag {
	var all []engine.Flag
	if o.MicroBatches > 0 {
		const source = engine.OverlapField + ".microBatches"
		all = append(all, engine.Flag{Names: []string{"--enable-two-batch-overlap"}, Source: source},
			// The engine refuses the combination of both flags.
			engine.Flag{Names: []string{"--enforce-shared-experts-fusion"}, Source: source, Forbidden: true})
	}
	if o.DistributionThresholdPercent != nil {
		all = append(all, engine.Flag{Names: []string{"--tbo-token-distribution-threshold"}, Value: fmt.Sprintf("%.2f", float64(*o.DistributionThresholdPercent)/100), Source: engine.OverlapField + ".distributionThresholdPercent"})
	}
	if o.CommunicationSMs > 0 {
		// Both members must have the same number.
		sms := fmt.Sprintf(`{"num_sms":%d}`, o.CommunicationSMs)
		all = append(all, engine.Flag{Names: []string{"--deepep-config"}, Value: fmt.Sprintf(`{"normal_dispatch":%s,"normal_combine":%s}`, sms, sms), Source: engine.OverlapField + ".communicationSMs"})
	}
	return all
}
