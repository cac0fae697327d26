// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestTiedEmbeddings serves a checkpoint with tied embeddings on an engine that ignores the tie. A condition
// reports it within a minute, whether or not a pod serves. Nothing is refused, and the report ends when another engine
// is used.
func TestTiedEmbeddings(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tied", func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Command, m.Spec.Replicas = nil, ptr.To[int32](0)
	})
	create(t, moed)
	waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "TiedEmbeddings", "lm_head.weight", "SGLang", "qwen3_moe")
	waitCondition(t, moed, semmoev1.ConditionReady, metav1.ConditionTrue, "ScaledToZero")
	waitCondition(t, moed, semmoev1.ConditionStalled, metav1.ConditionFalse, "NotStalled")
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Command = []string{"/semmoe-refengine"} })
	waitConditionWithin(t, time.Minute, moed, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
}
