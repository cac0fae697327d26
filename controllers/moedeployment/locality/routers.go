package locality

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

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/router/managerauth"
)

const (
	// observeTimeout bounds how long a router is asked, askTimeout how long all are, so that those that hang do not hold up the
	// reconciliation.
	observeTimeout = 2 * time.Second
	askTimeout     = 5 * time.Second
	// askedAtOnce is how many routers are asked at a time.
	askedAtOnce = 16
)

// enoughSamples is how many sampled requests a rate is reported from: with fewer it says little.
const enoughSamples = 30

// Traffic is what routers told, summed over them.
type Traffic struct {
	// Sketch is of the requests that were sampled of a revision.
	Sketch lar.Sketch
	// Capture compares sampled requests with others.
	Capture lar.CaptureCost
	// Engine is what the engines of the revision counted themselves, of all requests.
	Engine lar.Activations
}

// enoughActivations is the number of activations from which the engines' own counts are used: some thousand tokens.
const enoughActivations = 250_000

// Activations returns what the observed rate is of, and its source: the engines' own counts where they count, and else the sample. It
// reports false where neither is of enough requests.
func (o Traffic) Activations() (_ lar.Activations, _ semmoev1.LARSource, enough bool) {
	if o.Engine.Total >= enoughActivations {
		return o.Engine, semmoev1.LARSourceEngine, true
	}
	return o.Sketch.Overall.Activations, semmoev1.LARSourceRouter, o.Enough()
}

// TrafficOf sums what routers told of a revision.
func TrafficOf(reports []lar.Report, revision string) Traffic {
	sum := Traffic{Engine: lar.EngineActivations(reports, revision)}
	for _, report := range reports {
		sum.Sketch.Merge(report.Revision(revision))
		if report.CaptureCost != nil {
			sum.Capture.Merge(*report.CaptureCost)
		}
	}
	return sum
}

// Enough tells that the rate of the requests says something.
func (o Traffic) Enough() bool {
	return o.Sketch.Overall.Requests >= enoughSamples && o.Sketch.Overall.Total > 0
}

// RankLoads is how much each rank had to do of the sampled requests, in activations: as many for each token.
func (o Traffic) RankLoads() map[int]int64 {
	loads := map[int]int64{}
	for rank, ratio := range o.Sketch.Ranks {
		loads[rank] = ratio.Total
	}
	return loads
}

// AskRouters asks the routers what they observed, and returns the reports in their order. Routers that cannot be reached are left out:
// what the others saw is as good.
func AskRouters(ctx context.Context, c *http.Client, routers []*corev1.Pod) []lar.Report {
	log := logr.FromContextOrDiscard(ctx)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	told := make([]*lar.Report, len(routers))
	var asked errgroup.Group
	asked.SetLimit(askedAtOnce)
	for i, pod := range routers {
		if !podhealth.Ready(pod) || pod.Status.PodIP == "" {
			continue
		}
		asked.Go(func() error {
			report, err := fetchReport(ctx, c, pod.Status.PodIP)
			if err != nil {
				log.V(1).Info("Leaving a router out of the observed local activation rate", "pod", pod.Name, "reason", err.Error())
				return nil
			}
			told[i] = &report
			return nil
		})
	}
	_ = asked.Wait() // none returns an error
	var reports []lar.Report
	for _, report := range told {
		if report != nil {
			reports = append(reports, *report)
		}
	}
	return reports
}

// maxReport bounds a router's report; a usual one is a few hundred kilobytes.
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
