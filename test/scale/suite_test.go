// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"flag"
	"fmt"

	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/test/nodeless"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

const (
	namespace = "scale"
	profile   = "shared"
)

var deployments = flag.Int("deployments", 500, "number of MoEDeployments")

// world is a control plane without nodes, and the manager as a separate process.
type world struct {
	cluster        *nodeless.Cluster
	api            client.Client
	manager        *processes.Process
	metricsAddress string
	token          string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	repository, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := nodeless.Start(t.Context())
	tier.Require(t, err)
	t.Cleanup(func() {
		if err := cluster.Stop(); err != nil {
			t.Error(err)
		}
	})
	scheme, err := controllers.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	api, err := client.New(cluster.Config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{cluster: cluster, api: api}
	if err := cluster.NewNamespace(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	store := cluster.Run(t)
	agent, err := nodeless.NewAgent(cluster.Config, store.Client(t), repository)
	if err != nil {
		t.Fatal(err)
	}
	agentCtx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(agentCtx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	pods := httptest.NewServer(agent)
	t.Cleanup(pods.Close)
	w.token = w.metricsToken(t)
	w.startManager(t, pods.URL, "--store-url=https://"+store.Address(), "--store-ca="+store.Access.CA.String(), "--store-token-file="+store.Access.TokenFile)
	return w
}

// startManager starts the manager, which connects to pods through the proxy.
func (w *world) startManager(t *testing.T, proxy string, args ...string) {
	t.Helper()
	w.metricsAddress = ports.Address(t)
	log := filepath.Join(t.TempDir(), "manager.log")
	if name := os.Getenv("SCALE_LOG"); name != "" {
		log = name
	}
	args = append([]string{"manager", "--image=semmoe:dev", "--metrics-bind-address=" + w.metricsAddress, "--health-probe-bind-address=0"}, args...)
	semmoe, err := programs.Built("semmoe")
	tier.Require(t, err)
	w.manager, err = processes.Spawn(log, []string{"KUBECONFIG=" + w.cluster.Kubeconfig(), "HTTP_PROXY=" + proxy, "HTTPS_PROXY=" + proxy, "NO_PROXY=127.0.0.1"}, semmoe, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.manager.Stop(); err != nil {
			t.Error(err)
		}
	})
	w.eventually(t, time.Minute, "the manager serves its metrics", func() error {
		_, err := w.managerMetrics(t.Context())
		return err
	})
}

// eventually polls f until it returns no error. It fails the test with the last error after the given time, or when the
// manager has exited.
func (w *world) eventually(t *testing.T, within time.Duration, what string, f func() error) {
	t.Helper()
	deadline, tick := time.After(within), time.NewTicker(200*time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-w.manager.Ended():
			t.Fatalf("%s: the manager exited: %v", what, w.manager.Stop())
		case <-deadline:
			t.Fatalf("%s: condition not met within %v: %v", what, within, err)
		}
	}
}

func (w *world) create(t *testing.T, object client.Object) {
	t.Helper()
	if err := w.api.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
}

func model() semmoev1.ModelSpec {
	return semmoev1.ModelSpec{Volume: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "model", ReadOnly: true}}}
}

// createProfile creates the shared profile, and waits until it is complete.
func (w *world) createProfile(t *testing.T) {
	t.Helper()
	p := &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: profile},
		Spec: semmoev1.AffinityProfileSpec{
			Model: model(), Engine: semmoev1.EngineSpec{Image: "engine:1"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Dataset: &semmoev1.DatasetSpec{ConfigMap: &semmoev1.DatasetConfigMap{Name: "texts"}}, Target: semmoev1.ProfilingTargetDedicated,
		},
	}
	w.create(t, p)
	w.eventually(t, time.Minute, "the shared profile is complete", func() error {
		if err := w.api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(p.Status.Conditions, semmoev1.ConditionReady) {
			return fmt.Errorf("conditions %+v", p.Status.Conditions)
		}
		return nil
	})
}

// newDeployment returns a MoEDeployment that uses the shared profile.
func newDeployment(i int) *semmoev1.MoEDeployment {
	return &semmoev1.MoEDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("m%03d", i)},
		Spec: semmoev1.MoEDeploymentSpec{
			Model: model(), Engine: semmoev1.EngineSpec{Image: "engine:1"}, Parallelism: semmoev1.ParallelismSpec{ExpertParallelSize: 4},
			Replicas:  ptr.To[int32](1),
			Profiling: &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: profile}},
			Routing:   semmoev1.RoutingSpec{Replicas: 1},
			Rollout:   semmoev1.RolloutSpec{MaxSurge: ptr.To[int32](1), SoakSeconds: ptr.To[int32](0)},
		},
	}
}

// list returns all MoEDeployments.
func (w *world) list(ctx context.Context) ([]semmoev1.MoEDeployment, error) {
	var list semmoev1.MoEDeploymentList
	err := w.api.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// inService returns an error unless a MoEDeployment serves with its plan and has an observed rate.
func inService(moed *semmoev1.MoEDeployment) error {
	var missing []string
	for _, kind := range []string{semmoev1.ConditionReady, semmoev1.ConditionPlanned, semmoev1.ConditionRolledOut} {
		if c := meta.FindStatusCondition(moed.Status.Conditions, kind); c == nil || c.Status != metav1.ConditionTrue {
			missing = append(missing, fmt.Sprintf("%s: %+v", kind, c))
		}
	}
	if moed.Status.LAR == nil || moed.Status.LAR.ObservedMilli == nil {
		missing = append(missing, "no observed rate")
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s: %s", moed.Name, strings.Join(missing, "; "))
	}
	return nil
}

// solved returns the number of plans that the manager solved, from its log.
func (w *world) solved(t *testing.T) int {
	t.Helper()
	log, err := os.ReadFile(w.manager.Log())
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(log), "Solved a plan")
}
