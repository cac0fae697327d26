// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/managerauth"
)

const (
	// observeTimeout is the time limit for one router; totalTimeout is the limit for all, so that hanging routers do
	// not block the reconciliation.
	observeTimeout = 2 * time.Second
	totalTimeout   = 5 * time.Second
	// maxConcurrentReads is the number of routers that are queried concurrently.
	maxConcurrentReads = 16
)

// ReadRouters reads the observations of the routers, and returns the reports in the order of the routers. It omits
// unreachable routers: the reports of the others are equally representative.
func ReadRouters(ctx context.Context, c *http.Client, routers []*corev1.Pod) []lar.Report {
	log := logr.FromContextOrDiscard(ctx)
	ctx, cancel := context.WithTimeout(ctx, totalTimeout)
	defer cancel()
	byRouter := make([]*lar.Report, len(routers))
	var asked errgroup.Group
	asked.SetLimit(maxConcurrentReads)
	for i, pod := range routers {
		if !podhealth.Ready(pod) || pod.Status.PodIP == "" {
			continue
		}
		asked.Go(func() error {
			report, err := fetchReport(ctx, c, pod.Status.PodIP)
			if err != nil {
				log.V(1).Info("Failed to read the observations of a router, which is omitted from the local activation rate", "pod", pod.Name, "reason", err.Error())
				return nil
			}
			byRouter[i] = &report
			return nil
		})
	}
	_ = asked.Wait() // no goroutine returns an error
	var reports []lar.Report
	for _, report := range byRouter {
		if report != nil {
			reports = append(reports, *report)
		}
	}
	return reports
}

// maxReport is the maximum size of a router's report. A typical report has a few hundred kilobytes.
const maxReport = 16 << 20

func fetchReport(ctx context.Context, c *http.Client, podIP string) (lar.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	url := fmt.Sprintf("https://%s/v1/observations", net.JoinHostPort(podIP, fmt.Sprint(managerauth.Port)))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return lar.Report{}, err
	}
	response, err := c.Do(request)
	if err != nil {
		return lar.Report{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return lar.Report{}, fmt.Errorf("%s", response.Status)
	}
	var report lar.Report
	if err := json.NewDecoder(io.LimitReader(response.Body, maxReport)).Decode(&report); err != nil {
		return lar.Report{}, err
	}
	return report, report.Validate()
}
