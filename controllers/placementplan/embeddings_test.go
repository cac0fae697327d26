// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver/trace"
)

const tinyModel = "../../internal/refengine/testdata/tiny-qwen3moe"

// TestPlansUseEmbeddings solves plans from profiles with the token embeddings of the checkpoint, without them, and with
// damaged ones.
func TestPlansUseEmbeddings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path, reason, err := profile.CreateEmbeddings(t.Context(), t.TempDir(), tinyModel, "")
	if err != nil || reason != "" {
		t.Fatal(reason, err)
	}
	vectors, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	recorded, err := trace.Read(bytes.NewReader(traceFile(t)), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	// A quarter of the requests is too few for a drift test, whose calibration would take most of the time.
	var few bytes.Buffer
	if err := trace.Write(&few, recorded.Subset(slices.DeleteFunc(recorded.AllRequests(), func(r int) bool { return r%4 > 0 }))); err != nil {
		t.Fatal(err)
	}
	plans := map[string]*semmoev1.PlacementPlan{}
	for name, content := range map[string][]byte{"near": vectors, "plain": nil, "damaged": vectors[:len(vectors)/2], "other": []byte(strings.Replace(string(vectors), "(4096, 128)", "(8192, 64) ", 1))} {
		files := map[string][]byte{profile.TraceFile: few.Bytes(), profile.CountsFile: []byte("counts")}
		if content != nil {
			files[profile.EmbeddingsFile] = content
		}
		w.completeWith(w.newProfile(name), files)
		plans[name] = w.newPlan(name, name, func(p *semmoev1.PlacementPlan) {
			p.Spec.Attention, p.Spec.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleEnabled
			p.Spec.Solver.TrainPercent = 20 // many token IDs of the other requests are unseen
		})
	}
	for name, p := range plans {
		plans[name] = w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	}
	near, plain := plans["near"], plans["plain"]
	message := func(p *semmoev1.PlacementPlan) string {
		return meta.FindStatusCondition(p.Status.Conditions, semmoev1.ConditionReady).Message
	}
	t.Log(message(near))
	if !strings.Contains(message(near), "with nearest neighbours for the ") || strings.Contains(message(near), "not used") {
		t.Errorf("message %q", message(near))
	}
	if n, p := near.Status.Forecast, plain.Status.Forecast; n.LARMilli < p.LARMilli+20 || n.LayerNanos > p.LayerNanos {
		t.Errorf("with embeddings: %+v\nwithout: %+v", n, p)
	}
	if strings.Contains(message(plain), "neighbours") {
		t.Errorf("message %q", message(plain))
	}
	for _, name := range []string{"damaged", "other"} {
		if plans[name].Status.PlanDigest != plain.Status.PlanDigest {
			t.Errorf("%s embeddings: plan %s, want %s as without embeddings", name, plans[name].Status.Plan, plain.Status.Plan)
		}
	}
}
