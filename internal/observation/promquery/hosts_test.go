// SPDX-License-Identifier: Apache-2.0

package promquery_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

func TestParseHosts(t *testing.T) {
	for entry, want := range map[string]string{
		"prometheus.monitoring.svc": "prometheus.monitoring.svc", "Prometheus.Example.com:9090": "prometheus.example.com:9090",
		"10.0.0.1": "10.0.0.1", "10.0.0.1:9090": "10.0.0.1:9090", "fd00::1": "fd00::1", "[fd00::1]:9090": "[fd00::1]:9090", "127.0.0.1": "127.0.0.1",
		"": "", "http://prometheus": "", "prometheus:": "", "prometheus:http": "", "prometheus:0": "", "prometheus:65536": "", "prometheus/path": "", "user@prometheus": "",
		"*": "", "*.monitoring.svc": "", "169.254.169.254": "", "169.254.169.254:80": "", "::ffff:169.254.169.254": "", "64:ff9b::a9fe:a9fe": "", "fd00:ec2::254": "",
		"fe80::1": "", "0.0.0.0": "", "100.100.100.200": "", "a b": "",
	} {
		hosts, err := promquery.ParseHosts([]string{entry})
		if want == "" {
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q is invalid: ", entry)) {
				t.Errorf("%q: hosts %q, error %v; want an error with the host", entry, hosts, err)
			}
		} else if err != nil || len(hosts) != 1 || hosts[0] != want {
			t.Errorf("%q: hosts %q, error %v; want %q", entry, hosts, err, want)
		}
	}
}

func TestHostsAllow(t *testing.T) {
	hosts := promquery.Hosts{"prometheus.monitoring.svc", "example.com:8443", "10.0.0.1", "fd00::1"}
	for address, want := range map[string]bool{
		"http://prometheus.monitoring.svc": true, "https://prometheus.monitoring.svc:9090/base": true, "http://PROMETHEUS.monitoring.svc.": true,
		"https://example.com:8443": true, "https://example.com": false, "http://10.0.0.1:9090": true, "http://[fd00::1]:9090": true,
		"http://prometheus.team.svc:9090": true, "http://prometheus.team.svc.cluster.local": true,
		"http://prometheus": false, "http://prometheus.team": false, "http://prometheus.other.svc": false, "http://a.prometheus.team.svc": false,
		"http://.team.svc": false, "http://prometheus.team.svc.example.com": false, "http://prometheus.team.svc@evil.com": false,
		"http://user@prometheus.team.svc": false, "http://prometheus.team.svc?x=y": false, "http://prometheus.team.svc#x": false, "ftp://prometheus.team.svc": false,
		"http://10.0.0.2": false, "http://127.0.0.1": false, "http://169.254.169.254": false, "http://[::1]": false, "http://localhost": false, "http://2130706433": false, "": false,
	} {
		if got := hosts.Allows(address, "team"); got != want {
			t.Errorf("%q is allowed: %t, want %t", address, got, want)
		}
	}
}

// TestDialsOnlyAllowedAddresses verifies that listed names and Services are contacted only at allowed addresses, and a
// Service only at its cluster IP, regardless of DNS.
func TestDialsOnlyAllowedAddresses(t *testing.T) {
	environment, err := apiserver.Start(&envtest.Environment{})
	tier.Require(t, err)
	t.Cleanup(func() { environment.Stop() }) //nolint:errcheck // the processes end with this one
	api, err := client.New(environment.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const namespace = "team"
	create := func(object client.Object) {
		t.Helper()
		if err := api.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	port := []corev1.ServicePort{{Port: 80}}
	for name, spec := range map[string]corev1.ServiceSpec{
		"plain":    {Ports: port},
		"headless": {Ports: port, ClusterIP: corev1.ClusterIPNone},
		"external": {Type: corev1.ServiceTypeExternalName, ExternalName: "localhost"},
	} {
		create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec})
	}
	contacted := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a forbidden server was contacted") }))
	t.Cleanup(contacted.Close)
	at, err := url.Parse(contacted.URL)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ host, reason string }{
		"name of this node":            {"localhost:" + at.Port(), promquery.Unavailable},
		"unlisted address":             {at.Host, promquery.NotAllowed},
		"ExternalName of this node":    {"external.team.svc:" + at.Port(), promquery.NotAllowed},
		"headless Service":             {"headless.team.svc:" + at.Port(), promquery.NotAllowed},
		"missing Service":              {"absent.team.svc", promquery.NotAllowed},
		"Service of another namespace": {"kubernetes.default.svc", promquery.NotAllowed},
		"metadata service":             {"169.254.169.254", promquery.NotAllowed},
		"listed metadata service":      {"[64:ff9b::a9fe:a9fe]", promquery.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			asker := &promquery.Client{Hosts: promquery.Hosts{"localhost", "64:ff9b::a9fe:a9fe"}, Services: api}
			q := query("http://" + tc.host)
			q.Namespace, q.Token = namespace, "secret"
			_, err := asker.Range(t.Context(), q)
			var queryError *promquery.Error
			if !errors.As(err, &queryError) || queryError.Reason != tc.reason {
				t.Fatalf("error %v, want reason %s", err, tc.reason)
			}
			if tc.reason == promquery.Unavailable && !strings.Contains(queryError.Cause.Error(), "is not allowed") {
				t.Errorf("the address was dialed: %v", queryError.Cause)
			}
		})
	}
	// A Service with a cluster IP is allowed.
	q := query("http://plain.team.svc")
	q.Namespace = namespace
	transport := &hanging{}
	if _, err := (&promquery.Client{Services: api, Transport: transport}).Range(t.Context(), q); err == nil || transport.asked != 1 {
		t.Errorf("error %v after %d requests to the Service, want one", err, transport.asked)
	}
}
