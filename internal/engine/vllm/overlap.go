// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
)

// overlapBackends maps the all-to-all backends for which vLLM overlaps exchange and computation to the first release
// that does.
var overlapBackends = map[string]engine.Release{
	"deepep_low_latency": oldest, "deepep_high_throughput": oldest,
	"nixl_ep": {Minor: 24}, // vllm-project/vllm#45275
}

// backendVariable is the variable that selected the all-to-all backend until vllm-project/vllm#33535 removed it.
const backendVariable = "VLLM_ALL2ALL_BACKEND"

// checkOverlap checks the requirements of --enable-dbo and --ubatch-size. If one rank cannot split its step, no rank
// splits it.
func checkOverlap(s engine.Situation) error {
	o := s.Launch.Overlap
	backend, _ := engine.FlagValue(s.UserArgs, "--all2all-backend")
	first, overlaps := overlapBackends[backend]
	switch {
	case o.DistributionThresholdPercent != nil:
		return engine.RefuseOverlap("VLLM", "distributionThresholdPercent", "")
	case o.CommunicationSMs > 0:
		return engine.RefuseOverlap("VLLM", "communicationSMs", ", but a variable that spec.engine.env can set, VLLM_DBO_COMM_SMS")
	case !s.Launch.AttentionDP:
		return fmt.Errorf("%s: VLLM overlaps only with data-parallel attention, and spec.parallelism.attention is TensorParallel: use DataParallel, or remove the field", engine.OverlapField)
	case s.Launch.Ranks < 2:
		return fmt.Errorf("%s: spec.parallelism.expertParallelSize is %d: with one rank there is no exchange to overlap: remove the field", engine.OverlapField, s.Launch.Ranks)
	case !overlaps:
		return fmt.Errorf("%s: VLLM overlaps exchange and computation only with some backends: set --all2all-backend in spec.engine.args to %s, or remove the field",
			engine.OverlapField, strings.Join(slices.Sorted(maps.Keys(overlapBackends)), ", "))
	case s.Release.Before(first):
		return fmt.Errorf("%s: VLLM %s does not overlap exchange and computation with --all2all-backend %s: use %s or newer, or remove the field", engine.OverlapField, s.Release, backend, first)
	}
	return nil
}

// overlapFlags returns the flags for overlap. --enable-dbo, the older flag, means two micro-batches regardless of
// --ubatch-size.
func overlapFlags(o semmoev1.OverlapSpec) []engine.Flag {
	var all []engine.Flag
	threshold := func(name, member string, tokens int32) {
		if tokens > 0 {
			all = append(all, engine.Flag{Names: []string{name}, Value: strconv.Itoa(int(tokens)), Source: engine.OverlapField + "." + member})
		}
	}
	if o.MicroBatches > 0 {
		const source = engine.OverlapField + ".microBatches"
		two := o.MicroBatches == 2
		all = append(all,
			engine.Flag{Names: []string{"--enable-dbo"}, Source: source, Forbidden: !two},
			engine.Flag{Names: []string{"--no-enable-dbo", "--disable-dbo"}, Source: source, Forbidden: true},
			engine.Flag{Names: []string{"--ubatch-size"}, Value: strconv.Itoa(int(o.MicroBatches)), Source: source, Forbidden: two})
	}
	threshold("--dbo-decode-token-threshold", "decodeThresholdTokens", o.DecodeThresholdTokens)
	threshold("--dbo-prefill-token-threshold", "prefillThresholdTokens", o.PrefillThresholdTokens)
	return all
}
