// SPDX-License-Identifier: Apache-2.0

package installation

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/gitops"
	"github.com/semmoe/operator/test/hub/incluster"
	"github.com/semmoe/operator/test/programs"
)

const (
	// hubNamespace is the namespace of the model hub, argoNamespace the one of Argo CD's settings.
	hubNamespace, argoNamespace = "hub", "argocd"
	// compared is the number of prompts whose answers are compared before and after the rollout of the plan.
	compared = 20
)

// newcomer is the state of TestNewcomer.
type newcomer struct {
	*world
	// plan is the digest of the plan that waits for approval.
	plan string
	// before contains the answers under the default placement.
	before []answer
}

// TestNewcomer is the path of a new user, in docs/getting-started.md: the chart with a file of values, a model from a
// hub, and a plan that is approved in Argo CD. The chart has all settings: no object of the operator is patched.
func TestNewcomer(t *testing.T) {
	n := &newcomer{world: newWorld(t)}
	n.run(t, []step{
		{"prepare the cluster", n.prepareCluster},
		{"install the chart", n.installChart},
		{"download the model", n.download},
		{"serve", n.serveModel},
		{"profile and plan", n.waitPlan},
		{"approve in Argo CD", n.approve},
		{"roll the plan out", n.rollOut},
		{"observe", n.waitLocality},
		{"remove", n.removeAll},
	})
}

// prepareCluster adds what the cluster of a user has: volumes, a reachable model hub, and Argo CD with the settings of
// docs/gitops.md.
func (n *newcomer) prepareCluster(t *testing.T) {
	n.prepare(t, corev1.ReadWriteMany)
	n.startHub(t)
	n.kubectl(t, "", "create", "namespace", argoNamespace)
	n.kubectl(t, "", "create", "configmap", "argocd-cm", "--namespace", argoNamespace)
	n.kubectl(t, "", "patch", "configmap", "argocd-cm", "--namespace", argoNamespace, "--patch-file", filepath.Join(repository, "config", "argocd", "argocd-cm.yaml"))
	n.createDataset(t)
}

// startHub loads the image of the hub into the nodes, and starts a hub that contains the model of the sample.
func (n *newcomer) startHub(t *testing.T) {
	t.Helper()
	binary, err := incluster.Build()
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "hub.tar")
	tools := filepath.Join(repository, "internal", "tools")
	if _, err := programs.Run("go", nil, "", "run", "-C", tools, "./image/cmd/mkimage", "--binary", binary, "--name", incluster.Image, "--out", archive); err != nil {
		t.Fatal(err)
	}
	script(t, "load.sh", archive)
	// The repository may be in a directory that the user of the hub cannot read.
	directory := filepath.Join(n.directory, "hub")
	if err := os.CopyFS(directory, os.DirFS(checkpoint)); err != nil {
		t.Fatal(err)
	}
	n.kubectl(t, "", "create", "namespace", hubNamespace)
	pod, service := incluster.Objects(hubNamespace, "Qwen/Qwen3-30B-A3B", directory)
	for _, object := range []client.Object{pod, service} {
		if err := n.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	n.kubectl(t, "", "wait", "--namespace", hubNamespace, "--for=condition=Ready", "pod/"+incluster.Name, "--timeout=120s")
}

// installChart installs the chart with a file of values, and waits for the rollouts that its notes list.
func (n *newcomer) installChart(t *testing.T) {
	n.helm(t, "install", chart, "--values", filepath.Join("testdata", "values.yaml"))
	n.waitInstalled(t)
}

// download applies the sample with the hub as the source of its model, and waits for the model.
func (n *newcomer) download(t *testing.T) {
	source := fmt.Sprintf(`{"spec": {"model": {"source": {"huggingFace": {"repo": "Qwen/Qwen3-30B-A3B", "endpoint": %q}}}, "placement": {"approval": "Manual"}}}`, incluster.Endpoint(hubNamespace))
	n.kubectl(t, sample(t, "--patch", source), "apply", "-n", team, "-f", "-")
	var status *semmoev1.DownloadStatus
	eventually(t, waitTimeout, "the model is downloaded", func() error {
		moed, err := n.moedeployment(t.Context())
		if err != nil {
			return err
		}
		if status = moed.Status.Download; status == nil || status.Commit == "" {
			return fmt.Errorf("status.download is %+v; the conditions are %+v", status, moed.Status.Conditions)
		}
		return nil
	})
	if status.Bytes == 0 || status.Bytes != status.TotalBytes || status.Files != status.TotalFiles {
		t.Errorf("the complete download is %+v", status)
	}
	jobs := &batchv1.JobList{}
	if err := n.List(t.Context(), jobs, client.InNamespace(team), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentDownload}); err != nil {
		t.Fatal(err)
	}
	for _, job := range jobs.Items {
		t.Logf("%s: %s", job.Name, job.Annotations[semmoev1.AnnotationReport])
	}
	n.showState(t)
}

// serveModel waits until the model answers. The traffic begins here.
func (n *newcomer) serveModel(t *testing.T) {
	n.kubectl(t, "", "wait", "-n", team, "--for=condition=Ready", "moed/"+model, "--timeout=120s")
	n.traffic.start(n.parent)
	n.traffic.expectHealthy(t, mark{}, 1)
}

// waitPlan waits until a plan waits for approval.
func (n *newcomer) waitPlan(t *testing.T) {
	n.kubectl(t, "", "wait", "-n", team, "--for=condition=Planned", "moed/"+model, "--timeout=240s")
	var message string
	eventually(t, waitTimeout, "a plan waits for approval", func() error {
		moed, err := n.moedeployment(t.Context())
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
		if c == nil || c.Status != metav1.ConditionFalse || c.Reason != "AwaitingApproval" || moed.Status.PendingPlan == "" {
			return fmt.Errorf("the pending plan is %q, and condition RolledOut %+v", moed.Status.PendingPlan, c)
		}
		n.plan, message = moed.Status.PendingPlan, c.Message
		return nil
	})
	t.Log(message)
	n.showState(t)
}

// approve runs the action of Argo CD that approves the plan, with the scripts that argocd-cm contains.
func (n *newcomer) approve(t *testing.T) {
	n.before = n.answers(t)
	settings := &corev1.ConfigMap{}
	if err := n.Get(t.Context(), client.ObjectKey{Namespace: argoNamespace, Name: "argocd-cm"}, settings); err != nil {
		t.Fatal(err)
	}
	actions, err := gitops.ParseActions(settings.Data)
	if err == nil {
		err = actions.Run(t.Context(), n.Client, client.ObjectKey{Namespace: team, Name: model}, "approve")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// rollOut waits until the approved plan serves and routes the requests. No request may fail, and no answer may change.
func (n *newcomer) rollOut(t *testing.T) {
	begin := time.Now()
	n.kubectl(t, "", "wait", "-n", team, "--for=condition=RolledOut", "moed/"+model, "--timeout=240s")
	n.waitHealthy(t)
	t.Logf("RolledOut, and all replicas ready, after %s", seconds(time.Since(begin)))
	moed, err := n.moedeployment(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if moed.Status.PlanDigest != n.plan {
		t.Fatalf("plan %s serves, want the approved plan %s", moed.Status.PlanDigest, n.plan)
	}
	var after []answer
	eventually(t, waitTimeout, "requests routed by the plan", func() error {
		after = n.answers(t)
		for _, a := range after {
			if a.plan != n.plan {
				return fmt.Errorf("plan %q routed a request, want %s", a.plan, n.plan)
			}
		}
		return nil
	})
	for i, a := range after {
		if a.text != n.before[i].text {
			t.Errorf("answer %d is %q under the plan, and was %q before", i, a.text, n.before[i].text)
		}
	}
	n.traffic.expectHealthy(t, mark{}, 10)
}

// answers returns the answers to the first prompts of the traffic.
func (n *newcomer) answers(t *testing.T) []answer {
	t.Helper()
	_, prompts := texts()
	var all []answer
	for _, prompt := range prompts[:compared] {
		a, err := n.traffic.ask(prompt.Text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, a)
	}
	return all
}

// removeAll removes all objects. Afterwards the cluster contains only its initial objects.
func (n *newcomer) removeAll(t *testing.T) {
	n.showState(t)
	n.kubectl(t, "", "delete", "namespace", hubNamespace, argoNamespace, "--wait=false")
	n.delete(t)
	n.kubectl(t, "", "wait", "--for=delete", "namespace/"+hubNamespace, "namespace/"+argoNamespace, "--timeout=120s")
	n.remove(t)
}

// showState logs what a user sees.
func (n *newcomer) showState(t *testing.T) {
	t.Helper()
	t.Logf("kubectl get moed:\n%s", n.kubectl(t, "", "get", "moed", "-n", team))
}
