// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/schedule"
)

// scheduled returns the objects of a vLLM deployment with a plan in service, whose ConfigMap has a schedule, and the
// sizes of engine steps.
func scheduled(observed []int32, changes ...func(*semmoev1.MoEDeployment)) []client.Object {
	machines, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		panic(err)
	}
	shape := &pipeline.Shape{
		HiddenLayers: 48, MoELayers: 48, Experts: 128, TopK: 8, Hidden: 2048, ExpertSize: 768, Heads: 32, KVHeads: 4, QueryDim: 128, ValueDim: 128,
	}
	made, err := schedule.Of(shape, machines, schedule.Inputs{Ranks: 2, SlotsPerRank: 64, LAR: 0.6})
	if err != nil {
		panic(err)
	}
	encoded := func(value any) string {
		data, err := json.Marshal(value)
		if err != nil {
			panic(err)
		}
		return string(data)
	}
	slots := make([]int, 128)
	for i := range slots {
		slots[i] = i
	}
	files := map[string]string{
		"placement.json": encoded(map[string]any{"ep_size": 2, "num_experts": 128, "slots_per_rank": 64, "layers": []any{map[string]any{"layer": 1, "slots": slots}}}),
		"schedule.json":  encoded(made), "hardware.json": encoded(machines),
	}
	sums := map[string]string{}
	for name, text := range files {
		sums[name] = fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
	}
	files["manifest.json"] = encoded(map[string]any{
		"format": "semmoe-plan/1", "attention": "dp", "forecast": "table", "algorithm": "auto", "layout_digest": sums["placement.json"], "files": sums,
	})
	p := planned("qwen-c65ee2b4", fmt.Sprintf("%x", sha256.Sum256([]byte(files["manifest.json"]))), 10*time.Minute)
	held := &corev1.ConfigMap{ObjectMeta: ofQwen(p.Status.ConfigMap, 10*time.Minute, semmoev1.ComponentPlan), Data: files}
	serves := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine = semmoev1.EngineSpec{Type: semmoev1.EngineVLLM, Image: "vllm/vllm-openai:v0.32.0", Args: []string{"--all2all-backend", "deepep_high_throughput"}}
		m.Spec.Engine.Env = []corev1.EnvVar{{Name: "VLLM_USE_V2_MODEL_RUNNER", Value: "1"}} // sampled requests need it
		m.Status.PlanDigest, m.Status.BatchTokens = p.Status.Plan, &semmoev1.BatchTokensStatus{Source: semmoev1.BatchTokensObserved, Observed: observed}
	}
	return []client.Object{deployment(append([]func(*semmoev1.MoEDeployment){serves}, changes...)...), p, held}
}

// The printed patch is YAML, and applied as a merge patch it sets what is advised. Text of the user cannot break out of
// its comments.
func TestAdvisedPatch(t *testing.T) {
	hostile := func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--enable-dbo", "--ubatch-size=2\nspec: {replicas: 0}\r\u0085\u2028spec: {replicas: 0}")
	}
	for name, tc := range map[string]struct {
		objects []client.Object
		batches int32 // micro-batches after the patch
	}{
		"large batches": {scheduled([]int32{32768, 65536}), 2},
		"small batches": {scheduled([]int32{64, 128}), 0},
		"hostile text":  {scheduled([]int32{32768, 65536}, hostile), 0},
	} {
		for _, format := range []string{"patch", "yaml"} {
			shown, code := golden{command: "advise qwen -o " + format, objects: tc.objects}.run(t)
			if code != 0 {
				t.Fatalf("%s: exit code %d:\n%s", name, code, shown)
			}
			patch, err := yaml.YAMLToJSONStrict([]byte(shown))
			if err != nil {
				t.Fatalf("%s: %v:\n%s", name, err, shown)
			}
			c, moed := golden{objects: tc.objects}.cluster(t), &semmoev1.MoEDeployment{}
			if err := c.Patch(t.Context(), tc.objects[0].DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, patch)); err != nil {
				t.Fatal(err)
			}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(tc.objects[0]), moed); err != nil {
				t.Fatal(err)
			}
			batches := ptr.Deref(moed.Spec.Engine.Overlap, semmoev1.OverlapSpec{}).MicroBatches
			if *moed.Spec.Replicas != 2 || batches != tc.batches || strings.Contains(shown, "No change") != (tc.batches == 0) {
				t.Errorf("%s: %d replicas and %d micro-batches after the patch:\n%s", name, *moed.Spec.Replicas, batches, shown)
			}
		}
	}
}

func adviseGoldens() map[string]golden {
	noFiles, held := published("qwen-c65ee2b4", []int{0, 1, 2, 3}, []int{0, 1, 2, 3})
	large, small := scheduled([]int32{32768, 65536}), scheduled([]int32{64, 128})
	return map[string]golden{
		"advise":             {command: "advise qwen", objects: large, width: 100},
		"advise-keep":        {command: "advise qwen", objects: small, width: 100},
		"advise-patch":       {command: "advise qwen -o patch", objects: large},
		"advise-json":        {command: "advise qwen -o json", objects: large},
		"advise-no-schedule": {command: "advise qwen", objects: []client.Object{deployment(), noFiles, held}, width: 80},
		"advise-no-plan":     {command: "advise qwen", objects: []client.Object{deployment()}, width: 80, code: exitState},
		"advise-output":      {command: "advise qwen -o table", width: 80, code: exitUsage},
	}
}
