// SPDX-License-Identifier: Apache-2.0

package statemetrics

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// patience is the time that a scrape waits for the cache. The cache is slow only before its first synchronization.
const patience = 5 * time.Second

var (
	conditionDesc = prometheus.NewDesc("semmoe_condition", "Status of a condition: 1 for True, 0 for False, -1 for Unknown.",
		[]string{"kind", "namespace", "name", "type"}, nil)
	replicasDesc = prometheus.NewDesc("semmoe_replicas", "Replicas of a MoEDeployment, by state: desired, existing, ready, or updated (ready, and of the newest revision).",
		[]string{"namespace", "name", "state"}, nil)
)

// Collector reads the objects at each scrape.
type Collector struct {
	// Reader is the manager's cache.
	Reader client.Reader
	// Elected is closed when this manager becomes the leader.
	Elected <-chan struct{}
	// Log receives the errors of lists.
	Log logr.Logger
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- conditionDesc
	descriptions <- replicasDesc
}

// Collect sends the metrics of all objects, on the leader only. If the objects of a kind cannot be listed, this kind
// has no metrics, because an alert on unknown values would be false.
func (c *Collector) Collect(metrics chan<- prometheus.Metric) {
	select {
	case <-c.Elected:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var deployments semmoev1.MoEDeploymentList
	if c.list(ctx, "MoEDeployment", &deployments) {
		for i := range deployments.Items {
			moed := &deployments.Items[i]
			conditions(metrics, "MoEDeployment", moed, moed.Status.Conditions)
			replicas(metrics, moed)
		}
	}
	var profiles semmoev1.AffinityProfileList
	if c.list(ctx, "AffinityProfile", &profiles) {
		for i := range profiles.Items {
			conditions(metrics, "AffinityProfile", &profiles.Items[i], profiles.Items[i].Status.Conditions)
		}
	}
	var plans semmoev1.PlacementPlanList
	if c.list(ctx, "PlacementPlan", &plans) {
		for i := range plans.Items {
			conditions(metrics, "PlacementPlan", &plans.Items[i], plans.Items[i].Status.Conditions)
		}
	}
}

func (c *Collector) list(ctx context.Context, kind string, list client.ObjectList) bool {
	err := c.Reader.List(ctx, list, client.UnsafeDisableDeepCopy) // the objects are only read
	if err != nil {
		c.Log.Error(err, "Listing objects for metrics", "kind", kind)
	}
	return err == nil
}

func conditions(metrics chan<- prometheus.Metric, kind string, object client.Object, list []metav1.Condition) {
	for _, condition := range list {
		value := -1.0
		switch condition.Status {
		case metav1.ConditionTrue:
			value = 1
		case metav1.ConditionFalse:
			value = 0
		}
		metrics <- prometheus.MustNewConstMetric(conditionDesc, prometheus.GaugeValue, value, kind, object.GetNamespace(), object.GetName(), condition.Type)
	}
}

func replicas(metrics chan<- prometheus.Metric, moed *semmoev1.MoEDeployment) {
	desired := int32(1) // the schema's default
	if moed.Spec.Replicas != nil {
		desired = *moed.Spec.Replicas
	}
	for state, count := range map[string]int32{
		"desired": desired, "existing": moed.Status.Replicas, "ready": moed.Status.ReadyReplicas, "updated": moed.Status.UpdatedReplicas,
	} {
		metrics <- prometheus.MustNewConstMetric(replicasDesc, prometheus.GaugeValue, float64(count), moed.Namespace, moed.Name, state)
	}
}
