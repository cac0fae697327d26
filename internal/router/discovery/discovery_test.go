// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
)

func enginePod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Labels:      map[string]string{semmoev1.LabelRevision: "r1"},
			Annotations: map[string]string{semmoev1.AnnotationPort: "30000", semmoev1.AnnotationRanks: "4"},
		},
		Status: corev1.PodStatus{PodIP: "10.0.0.1", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func TestBackends(t *testing.T) {
	base := Backend{Pod: "p", Address: "10.0.0.1:30000", Ranks: 4, Revision: "r1"}
	ports := func(rankPorts, activePorts string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Annotations[semmoev1.AnnotationRankPorts] = rankPorts
			if activePorts != "" {
				p.Annotations[annotationActivePorts] = activePorts
			}
		}
	}
	onPorts := func(addresses ...string) []Backend {
		b := base
		b.RankAddresses = addresses
		return []Backend{b}
	}
	noRanks := base
	noRanks.Ranks = 0
	cases := map[string]struct {
		change func(*corev1.Pod)
		want   []Backend
	}{
		"ready":              {func(*corev1.Pod) {}, []Backend{base}},
		"not ready":          {func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }, nil},
		"no condition yet":   {func(p *corev1.Pod) { p.Status.Conditions = nil }, nil},
		"being deleted":      {func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, nil},
		"no address yet":     {func(p *corev1.Pod) { p.Status.PodIP = "" }, nil},
		"port above all":     {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationPort] = "70000" }, nil},
		"far too many ranks": {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationRanks] = "3000000" }, []Backend{noRanks}},
		"negative ranks":     {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationRanks] = "-1" }, []Backend{noRanks}},
		"an endless shape": {func(p *corev1.Pod) {
			p.Annotations[semmoev1.AnnotationModelShape] = `{"layers":9000000000,"moeLayers":[0],"experts":2,"expertsPerToken":1}`
		}, []Backend{base}},
		"port not a number":      {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationPort] = "x" }, nil},
		"IPv6":                   {func(p *corev1.Pod) { p.Status.PodIP = "fd00::1" }, []Backend{{Pod: "p", Address: "[fd00::1]:30000", Ranks: 4, Revision: "r1"}}},
		"serves under a plan":    {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationPlanDigest] = "d1" }, []Backend{{Pod: "p", Address: "10.0.0.1:30000", Ranks: 4, Revision: "r1", PlanDigest: "d1"}}},
		"permuted checkpoint":    {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationRealization] = "ReshuffledWeights" }, []Backend{{Pod: "p", Address: "10.0.0.1:30000", Ranks: 4, Revision: "r1", Permuted: true}}},
		"expert map":             {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationRealization] = "EngineMap" }, []Backend{base}},
		"names its engine":       {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationEngine] = "VLLM" }, []Backend{{Pod: "p", Address: "10.0.0.1:30000", Engine: "VLLM", Ranks: 4, Revision: "r1"}}},
		"TLS":                    {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationScheme] = "https" }, []Backend{{Pod: "p", Address: "10.0.0.1:30000", TLS: true, Ranks: 4, Revision: "r1"}}},
		"plain text":             {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationScheme] = "http" }, []Backend{base}},
		"unknown scheme":         {func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationScheme] = "h2c" }, nil},
		"takes no rank":          {func(p *corev1.Pod) { delete(p.Annotations, semmoev1.AnnotationRanks) }, []Backend{{Pod: "p", Address: "10.0.0.1:30000", Ranks: 0, Revision: "r1"}}},
		"a port for each rank":   {ports("8000, 8001,8002,8003", ""), onPorts("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:8002", "10.0.0.1:8003")},
		"some ports are live":    {ports("8000,8001,8002,8003", "8003,8001"), onPorts("", "10.0.0.1:8001", "", "10.0.0.1:8003")},
		"no port is live":        {ports("8000,8001,8002,8003", "9000"), nil},
		"too few ports":          {ports("8000,8001", ""), []Backend{noRanks}},
		"not all are ports":      {ports("8000,x,8002,8003", ""), []Backend{noRanks}},
		"port 0":                 {ports("8000,0,8002,8003", ""), []Backend{noRanks}},
		"port above 65535":       {ports("8000,65536,8002,8003", ""), []Backend{noRanks}},
		"the one port is live":   {func(p *corev1.Pod) { p.Annotations[annotationActivePorts] = "30000" }, []Backend{base}},
		"the one port is not":    {func(p *corev1.Pod) { p.Annotations[annotationActivePorts] = "30001" }, nil},
		"no port is listed":      {func(p *corev1.Pod) { p.Annotations[annotationActivePorts] = "" }, nil},
		"ports of IPv6 pods too": {func(p *corev1.Pod) { p.Status.PodIP = "fd00::1"; ports("1,2,3,4", "2")(p) }, []Backend{{Pod: "p", Address: "[fd00::1]:30000", Ranks: 4, Revision: "r1", RankAddresses: []string{"", "[fd00::1]:2", "", ""}}}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Backends([]*corev1.Pod{enginePod("p", tc.change)})); diff != "" {
				t.Errorf("backends (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSnapshot(t *testing.T) {
	dir := t.TempDir()
	if _, found, err := LoadSnapshot(dir); found || err != nil {
		t.Fatalf("empty directory: found %v, error %v", found, err)
	}
	if err := SaveSnapshot(dir, []Backend{{Pod: "p", Ranks: MaxRanks + 1}}); err != nil {
		t.Fatal(err)
	}
	if got, _, err := LoadSnapshot(dir); err != nil || got[0].Ranks != 0 {
		t.Fatalf("too many ranks are read as %+v, %v", got, err)
	}
	want := []Backend{{Pod: "p", Address: "10.0.0.1:30000", Ranks: 2, RankAddresses: []string{"10.0.0.1:1", ""}, Revision: "r1", Permuted: true}}
	if err := SaveSnapshot(dir, want); err != nil {
		t.Fatal(err)
	}
	got, found, err := LoadSnapshot(dir)
	if diff := cmp.Diff(want, got); diff != "" || !found || err != nil {
		t.Fatalf("found %v, error %v, (-want +got):\n%s", found, err, diff)
	}
	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Errorf("%d files are left, want 1", len(files))
	}
	if err := os.WriteFile(filepath.Join(dir, snapshotName), []byte(`[{"pod"`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := LoadSnapshot(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a damaged snapshot gives %v", err)
	}
	if err := os.Remove(filepath.Join(dir, snapshotName)); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, snapshotName), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := LoadSnapshot(dir); err == nil || !strings.Contains(err.Error(), "named pipe") {
		t.Errorf("a named pipe as a snapshot gives %v", err)
	}
}

// TestPinnable checks that pods keep their ranks and plans if their engine accepts a rank. The default engine applies
// to pods that name none.
func TestPinnable(t *testing.T) {
	shape := &lar.Shape{Layers: 4, MoELayers: []int{0, 1, 2, 3}, Experts: 32, ExpertsPerToken: 4}
	for other, keeps := range map[string][]string{"X-Rank": {"", "SGLang", "another"}, "": {"SGLang"}} {
		for _, own := range []string{"", "SGLang", "another", "TensorRTLLM"} {
			before := Backend{Pod: "a", Address: "x:1", Engine: own, Ranks: 2, RankAddresses: []string{"x:1", "x:2"}, Revision: "r", PlanDigest: "d", Permuted: true, Shape: shape}
			want := before
			if !slices.Contains(keeps, own) {
				want = Backend{Pod: "a", Address: "x:1", Engine: own, Width: 2, Revision: "r", Shape: shape}
			}
			backends := []Backend{before}
			if after := Pinnable(backends, &engine.Adapter{RankHeader: other}); !after[0].Equal(want) || !backends[0].Equal(before) {
				t.Errorf("engine %q, rank header %q: %+v becomes %+v", own, other, before, after[0])
			} else if again := Pinnable(after, &engine.Adapter{RankHeader: other}); !again[0].Equal(want) {
				t.Errorf("engine %q, rank header %q: %+v becomes %+v when it was read back", own, other, before, again[0])
			}
		}
	}
}

// TestBackendsWithDefaultPlan checks that the default plan applies only to pods that name no plan.
func TestBackendsWithDefaultPlan(t *testing.T) {
	before := []Backend{{Pod: "a"}, {Pod: "b", PlanDigest: "own"}}
	after := WithDefaultPlan(before, "default")
	if after[0].PlanDigest != "default" || after[1].PlanDigest != "own" || before[0].PlanDigest != "" {
		t.Errorf("%+v becomes %+v", before, after)
	}
	if after := WithDefaultPlan(before, ""); after[0].PlanDigest != "" {
		t.Errorf("without a default: %+v", after)
	}
}

// TestProblem checks that Problem names each ignored annotation, and reports nothing for a valid pod.
func TestProblem(t *testing.T) {
	for name, tc := range map[string]struct{ annotation, value, want string }{
		"valid":          {semmoev1.AnnotationRanks, "8", ""},
		"no ranks":       {semmoev1.AnnotationRanks, "0", ""},
		"too many ranks": {semmoev1.AnnotationRanks, "3000000", `annotation semmoe.io/ranks: "3000000" is invalid: 0 to 4096 is allowed`},
		"ports":          {semmoev1.AnnotationRankPorts, "1,2", `annotation semmoe.io/rank-ports: "1,2" is invalid: one port for each rank is allowed`},
		"port":           {semmoev1.AnnotationPort, "70000", `annotation semmoe.io/port: "70000" is invalid: 1 to 65535 is allowed`},
		"TLS":            {semmoev1.AnnotationScheme, "https", ""},
		"no TLS":         {semmoev1.AnnotationScheme, "http", ""},
		"scheme":         {semmoev1.AnnotationScheme, "HTTPS", `annotation semmoe.io/scheme: "HTTPS" is invalid: http or https is allowed`},
		"shape":          {semmoev1.AnnotationModelShape, "{}", `annotation semmoe.io/model-shape: "{}" is invalid: the shape of a model is allowed`},
		"plan":           {semmoev1.AnnotationPlanDigest, "../x", `annotation semmoe.io/plan-digest: "../x" is invalid: 64 hexadecimal digits are allowed`},
	} {
		pod := enginePod("p", func(p *corev1.Pod) { p.Annotations[tc.annotation] = tc.value })
		if got := Problem(pod); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// TestLogsAProblemOnce checks that a problem of a pod is logged once, and again when it changes.
func TestLogsAProblemOnce(t *testing.T) {
	lines := 0
	log := funcr.New(func(string, string) { lines++ }, funcr.Options{})
	pods := []*corev1.Pod{enginePod("p", func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationRanks] = "x" })}
	known := logProblems(log, pods, nil)
	if known = logProblems(log, pods, known); lines != 1 {
		t.Errorf("%d lines, want 1", lines)
	}
	pods[0].Annotations[semmoev1.AnnotationRanks] = "-1"
	if logProblems(log, pods, known); lines != 2 {
		t.Errorf("%d lines after a change, want 2", lines)
	}
}
