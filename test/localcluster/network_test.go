// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
)

// expose creates a Service for the pods with the app label and returns its forwarded address.
func expose(t *testing.T, client kubernetes.Interface, namespace, app string) string {
	t.Helper()
	createService(t, client, namespace, app, "")
	address, err := shared.cluster.Forward(t.Context(), namespace, app, 8000)
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// createService creates a Service on port 8000 for port 80 of the pods with the app label.
func createService(t *testing.T, client kubernetes.Interface, namespace, app, clusterIP string) {
	t.Helper()
	_, err := client.CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: app},
		Spec: corev1.ServiceSpec{
			ClusterIP: clusterIP, Selector: map[string]string{"app": app},
			Ports: []corev1.ServicePort{{Port: 8000, TargetPort: intstr.FromInt32(80)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// get sends one request on a new connection.
func get(url string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

func says(ask func() (string, error), want string) error {
	got, err := ask()
	if err == nil && got != want {
		err = fmt.Errorf("got %q, want %q", got, want)
	}
	return err
}

func TestServiceNames(t *testing.T) {
	client, ns := sandboxed(t)
	create(t, client, ns, serverOf("server"))
	createService(t, client, ns, "server", "")
	waitPod(t, client, ns, "server", isReady)
	service, err := client.CoreV1().Services(ns).Get(t.Context(), "server", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, host := range []string{
		service.Spec.ClusterIP, "server", "server." + ns, "server." + ns + ".svc", "server." + ns + ".svc.cluster.local",
	} {
		client := podOf(fmt.Sprintf("client-%d", i), "fetch", "http://"+host+":8000/")
		if got := runToEnd(t, shared.client, ns, client, corev1.PodSucceeded); got != "server" {
			t.Errorf("%s returns %q", host, got)
		}
	}
}

func TestReadinessMakesEndpoints(t *testing.T) {
	client, ns := sandboxed(t)
	pod := serverOf("server")
	pod.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(80)}}, PeriodSeconds: 1, FailureThreshold: 1,
	}
	create(t, client, ns, pod)
	address := expose(t, client, ns, "server")
	ask := func() (string, error) { return get("http://" + address + "/") }
	eventually(t, 20*time.Second, func() error { return says(ask, "server") })
	if _, err := get("http://" + address + "/break"); err != nil {
		t.Fatal(err)
	}
	waitPod(t, client, ns, "server", func(p *corev1.Pod) error {
		if isReady(p) == nil {
			return fmt.Errorf("still ready")
		}
		return nil
	})
	eventually(t, 10*time.Second, func() error {
		if body, err := ask(); err == nil {
			return fmt.Errorf("an unready pod still serves: %q", body)
		}
		return nil
	})
}

func TestStatefulSetRolls(t *testing.T) {
	client, ns := sandboxed(t)
	sets := client.AppsV1().StatefulSets(ns)
	createService(t, client, ns, "set", corev1.ClusterIPNone)
	template := serverOf("set")
	template.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}, PeriodSeconds: 1,
	}
	set, err := sets.Create(t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "set"},
		Spec: appsv1.StatefulSetSpec{
			ServiceName: "set", Replicas: ptr(int32(2)), PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: template.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: template.Labels}, Spec: template.Spec},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	waitRolled(t, client, set)
	const patch = `{"spec":{"template":{"metadata":{"annotations":{"version":"2"}}}}}`
	if set, err = sets.Patch(t.Context(), "set", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	waitRolled(t, client, set)
	for i := range 2 {
		name := fmt.Sprintf("set-%d", i)
		pod, err := client.CoreV1().Pods(ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if pod.Annotations["version"] != "2" {
			t.Errorf("%s was not replaced", name)
		}
		// The name resolves to the new pod: only there the file contains this host name.
		log := runToEnd(t, client, ns, podOf(fmt.Sprintf("client-%d", i), "fetch", fmt.Sprintf("http://%s.set:80/file?path=/etc/hostname", name)), corev1.PodSucceeded)
		if log != name+"\n" {
			t.Errorf("host name behind %s.set is %q", name, log)
		}
	}
}

func waitRolled(t *testing.T, client kubernetes.Interface, set *appsv1.StatefulSet) {
	t.Helper()
	eventually(t, 40*time.Second, func() error {
		now, err := client.AppsV1().StatefulSets(set.Namespace).Get(t.Context(), set.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := now.Status
		if s.ObservedGeneration < set.Generation || s.ReadyReplicas != 2 || s.UpdatedReplicas != 2 || s.CurrentRevision != s.UpdateRevision {
			return fmt.Errorf("rollout is not complete: %s", s.String())
		}
		return nil
	})
}

func TestServiceAccountReachesAPIServer(t *testing.T) {
	client, ns := sandboxed(t)
	// The version endpoint needs no credentials. The server certificate is verified against the mounted authority.
	pod := podOf("client", "fetch", "https://$(KUBERNETES_SERVICE_HOST)/version")
	pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env,
		corev1.EnvVar{Name: "SSL_CERT_FILE", Value: "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"})
	if log := runToEnd(t, client, ns, pod, corev1.PodSucceeded); len(log) == 0 {
		t.Error("the response is empty")
	}
}
