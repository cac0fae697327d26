// SPDX-License-Identifier: Apache-2.0

package front

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/ownership"
)

// TestRouterTLSAndKeys checks that each Secret is mounted and named by an argument, that the Service reports the
// protocol, and that it never selects engines, which check neither certificates nor keys.
func TestRouterTLSAndKeys(t *testing.T) {
	tls := func(clients string) *semmoev1.RoutingTLS {
		return &semmoev1.RoutingTLS{SecretName: "certificate", ClientCASecretName: clients}
	}
	auth := &semmoev1.RoutingAuth{SecretName: "keys"}
	for name, tc := range map[string]struct {
		routing  semmoev1.RoutingSpec
		secrets  string
		args     []string
		protocol string
		target   string
	}{
		"neither": {semmoev1.RoutingSpec{}, "", nil, "http", semmoev1.ComponentEngine},
		"TLS":     {semmoev1.RoutingSpec{TLS: tls("")}, "certificate", []string{"--tls-cert-file=/etc/semmoe/tls/tls.crt", "--tls-key-file=/etc/semmoe/tls/tls.key"}, "https", semmoev1.ComponentRouter},
		"client certificates": {semmoev1.RoutingSpec{TLS: tls("clients")}, "certificate clients",
			[]string{"--tls-cert-file=/etc/semmoe/tls/tls.crt", "--tls-key-file=/etc/semmoe/tls/tls.key", "--tls-client-ca-file=/etc/semmoe/client-ca/ca.crt"}, "https", semmoev1.ComponentRouter},
		"limits": {semmoev1.RoutingSpec{Auth: &semmoev1.RoutingAuth{SecretName: "keys", RequestsPerMinute: new(int32(60)), PendingLimit: new(int32(4))}}, "keys",
			[]string{"--api-keys-dir=/etc/semmoe/api-keys", "--client-requests-per-minute=60", "--client-pending-limit=4"}, "http", semmoev1.ComponentRouter},
		"keys": {semmoev1.RoutingSpec{Auth: auth}, "keys", []string{"--api-keys-dir=/etc/semmoe/api-keys"}, "http", semmoev1.ComponentRouter},
	} {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
				m.Spec.Routing.TLS, m.Spec.Routing.Auth = tc.routing.TLS, tc.routing.Auth
			})
			pod := routerDeployment(moed, "semmoe:1", "uid", "PEM").Spec.Template.Spec
			var secrets, mounts []string
			for _, volume := range pod.Volumes {
				if volume.Secret != nil {
					secrets = append(secrets, *volume.Secret.SecretName)
					mounts = append(mounts, *volume.Name)
				}
			}
			if got := strings.Join(secrets, " "); got != tc.secrets {
				t.Errorf("Secrets %q, want %q", got, tc.secrets)
			}
			for _, mount := range pod.Containers[0].VolumeMounts {
				mounts = slices.DeleteFunc(mounts, func(name string) bool { return name == *mount.Name && *mount.ReadOnly })
			}
			if len(mounts) > 0 {
				t.Errorf("volumes %v are not mounted read-only", mounts)
			}
			args := slices.DeleteFunc(slices.Clone(pod.Containers[0].Args), func(arg string) bool {
				return !strings.HasPrefix(arg, "--tls-") && !strings.HasPrefix(arg, "--api-keys-") && !strings.HasPrefix(arg, "--client-")
			})
			if !slices.Equal(args, tc.args) {
				t.Errorf("arguments %v, want %v", args, tc.args)
			}
			if got := *service(moed, semmoev1.ComponentRouter).Spec.Ports[0].AppProtocol; got != tc.protocol {
				t.Errorf("protocol %s, want %s", got, tc.protocol)
			}
			engines := &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m", Labels: ownership.OperatorLabels()},
				Spec:       corev1.ServiceSpec{Selector: map[string]string{semmoev1.LabelComponent: semmoev1.ComponentEngine}},
			}
			c := moedtest.Cluster(t, engines)
			f := &Front{Client: c, Live: c}
			if got, err := f.serviceTarget(t.Context(), moed, false); err != nil || got != tc.target {
				t.Errorf("the Service selects %s, want %s (error %v)", got, tc.target, err)
			}
		})
	}
}

// TestRouterVerifiesEngines checks that request routers get the authorities of engines with TLS, and only these of the
// Secret, until no engine serves TLS.
func TestRouterVerifiesEngines(t *testing.T) {
	secured := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.TLS = &semmoev1.EngineTLS{SecretName: "engine-certificate"}
	})
	workload := func(moed *semmoev1.MoEDeployment, replicas *int32) Engines {
		rendered, err := revisions.Render(moed, "r1", moedtest.Report(), nil, revisions.Own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		rendered.Object.(*appsv1.StatefulSet).Spec.Replicas = replicas
		return Engines{Workloads: []*revisions.Workload{rendered}}
	}
	for name, tc := range map[string]struct {
		moed    *semmoev1.MoEDeployment
		engines Engines
		secured bool
	}{
		"plain text":              {moedtest.Deployment(), workload(moedtest.Deployment(), new(int32(1))), false},
		"TLS":                     {secured, Engines{}, true},
		"to TLS":                  {secured, workload(moedtest.Deployment(), new(int32(1))), true},
		"from TLS":                {moedtest.Deployment(), workload(secured, new(int32(1))), true},
		"from TLS, one replica":   {moedtest.Deployment(), workload(secured, nil), true},
		"from TLS, pods are gone": {moedtest.Deployment(), workload(secured, new(int32(0))), false},
	} {
		pod := routerDeployment(tc.engines.withTLS(tc.moed), "semmoe:1", "uid", "PEM").Spec.Template.Spec
		for _, arg := range []string{"--engine-tls-ca-file=/etc/semmoe/engine-ca/ca.crt", "--engine-tls-server-name=m-pods.ns.svc"} {
			if slices.Contains(pod.Containers[0].Args, arg) != tc.secured {
				t.Errorf("%s: arguments %v, want %s: %t", name, pod.Containers[0].Args, arg, tc.secured)
			}
		}
		at := slices.IndexFunc(pod.Volumes, func(v coreac.VolumeApplyConfiguration) bool { return *v.Name == "engine-ca" })
		if (at >= 0) != tc.secured {
			t.Errorf("%s: volumes %+v", name, pod.Volumes)
		}
		if at < 0 {
			continue
		}
		if secret := pod.Volumes[at].Secret; *secret.SecretName != "engine-certificate" || len(secret.Items) != 1 || *secret.Items[0].Key != "ca.crt" {
			t.Errorf("%s: the volume has %+v", name, secret)
		}
	}
	if got := *podsService(secured).Spec.Ports[0].AppProtocol; got != "https" {
		t.Errorf("the Service of the pods has protocol %s", got)
	}
}
