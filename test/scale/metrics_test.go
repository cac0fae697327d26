// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// sample is one line of a text exposition.
type sample struct {
	labels map[string]string
	value  float64
}

var (
	sampleLine  = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$`)
	labelInLine = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
)

// samplesOf returns the samples of a metric in a text exposition.
func samplesOf(t *testing.T, text, metric string) []sample {
	t.Helper()
	var samples []sample
	for line := range strings.Lines(text) {
		parts := sampleLine.FindStringSubmatch(strings.TrimSpace(line))
		if parts == nil || parts[1] != metric {
			continue
		}
		value, err := strconv.ParseFloat(parts[3], 64)
		if err != nil {
			t.Fatalf("metric %s: %v", metric, err)
		}
		s := sample{map[string]string{}, value}
		for _, label := range labelInLine.FindAllStringSubmatch(parts[2], -1) {
			s.labels[label[1]] = label[2]
		}
		samples = append(samples, s)
	}
	if len(samples) == 0 {
		t.Fatalf("metric %s is missing", metric)
	}
	return samples
}

// Verbs that write, and resources that are not counted because they hold no state: leases are heartbeats, reviews are
// queries, and token requests return a token.
var (
	writing   = []string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
	stateless = []string{"leases", "tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews"}
)

// writes returns the number of write requests of all clients to the API server, by verb and resource.
func (w *world) writes(t *testing.T) map[string]int {
	t.Helper()
	text, err := w.cluster.Clients.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for _, s := range samplesOf(t, string(text), "apiserver_request_total") {
		if !slices.Contains(writing, s.labels["verb"]) || slices.Contains(stateless, s.labels["resource"]) || s.labels["subresource"] == "token" {
			continue
		}
		key := s.labels["verb"] + " " + s.labels["resource"]
		if s.labels["subresource"] != "" {
			key += "/" + s.labels["subresource"]
		}
		if code := s.labels["code"]; !strings.HasPrefix(code, "2") {
			key += " (" + code + ")"
		}
		counts[key] += int(s.value)
	}
	return counts
}

// since returns the increase of each count.
func since(before, after map[string]int) map[string]int {
	added := map[string]int{}
	for key, n := range after {
		if n > before[key] {
			added[key] = n - before[key]
		}
	}
	return added
}

func total(counts map[string]int) int {
	sum := 0
	for _, n := range counts {
		sum += n
	}
	return sum
}

// table formats counts, one per line, in descending order.
func table(counts map[string]int) string {
	keys := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return counts[b] - counts[a] })
	var text strings.Builder
	for _, key := range keys {
		fmt.Fprintf(&text, "\n  %7d %s", counts[key], key)
	}
	return text.String()
}

// metricsToken returns the token of a user who is allowed to read metrics.
func (w *world) metricsToken(t *testing.T) string {
	t.Helper()
	clients, name := w.cluster.Clients, metav1.ObjectMeta{Name: "metrics-reader"}
	if _, err := clients.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: name}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := clients.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: name, Rules: []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := clients.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name.Name}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	answer, err := clients.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), name.Name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

// managerMetrics returns the metrics of the manager.
func (w *world) managerMetrics(ctx context.Context) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+w.metricsAddress+"/metrics", nil)
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+w.token)
	// The manager signs its own certificate.
	direct := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer direct.CloseIdleConnections()
	response, err := direct.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, text)
	}
	return string(text), err
}

// reconciles returns the number of reconciliations so far, by controller. A panic of a controller fails the test.
func (w *world) reconciles(t *testing.T) map[string]int {
	t.Helper()
	text, err := w.managerMetrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for _, s := range samplesOf(t, text, "controller_runtime_reconcile_total") {
		counts[s.labels["controller"]] += int(s.value)
	}
	for _, s := range samplesOf(t, text, "controller_runtime_reconcile_panics_total") {
		if s.value > 0 {
			t.Errorf("controller %s panicked %v times", s.labels["controller"], s.value)
		}
	}
	return counts
}
