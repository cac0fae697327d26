// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/plan"
)

const (
	// listPeriod is the poll period of the files of a list.
	listPeriod = 2 * time.Second
	// maxListFile bounds the size of a file of backends, maxListed the number of backends.
	maxListFile = 1 << 20
	maxListed   = 1024
	// resolveTimeout bounds the time to resolve the names of all backends.
	resolveTimeout = 10 * time.Second
)

// List is a list of engines without Kubernetes: URLs, and files that are read again after each change. The plans of its
// engines are directories. A List is used by one router, and is safe for concurrent use.
type List struct {
	// urls are the backends that are given as URLs, files the files with further backends.
	urls  []entry
	files []string
	// engine is the engine type of backends that do not name theirs.
	engine string
	// resolve returns the addresses of a host name.
	resolve func(ctx context.Context, host string) ([]string, error)

	mu sync.Mutex
	// plans contains the plans in use, by directory.
	plans map[string]listedPlan
}

// listedPlan is a verified plan directory.
type listedPlan struct {
	digest, model string
	ranks         int
	shape         *lar.Shape
}

// ListDefaults apply to the backends of a list that are URLs.
type ListDefaults struct {
	// Engine is the engine type. It also applies to backends of a file that do not name theirs.
	Engine string
	// Ranks is the number of ranks; 0 selects the ranks of the plan.
	Ranks int
	// PlanDir is the directory of a plan; empty if there is none.
	PlanDir string
}

// NewList parses a comma-separated list of URLs of engines and of files, without reading the files.
func NewList(text string, defaults ListDefaults) (*List, error) {
	l := &List{engine: defaults.Engine, resolve: net.DefaultResolver.LookupHost, plans: map[string]listedPlan{}}
	for part := range strings.SplitSeq(text, ",") {
		switch part = strings.TrimSpace(part); {
		case part == "":
			return nil, fmt.Errorf("%q is invalid: a file, or URLs separated by commas, are allowed", text)
		case strings.Contains(part, "://"):
			e := entry{at: strconv.Quote(part), Address: part, Ranks: defaults.Ranks, PlanDir: defaults.PlanDir}
			if _, _, err := e.parseAddress(); err != nil {
				return nil, err
			}
			l.urls = append(l.urls, e)
		default:
			l.files = append(l.files, part)
		}
	}
	if len(l.urls) == 0 && (defaults.Ranks != 0 || defaults.PlanDir != "") {
		return nil, errors.New("a number of ranks and a plan directory apply to URLs; a file has the fields ranks and planDir")
	}
	return l, nil
}

// PlanDir returns the directory with the plan of a digest, or an empty string.
func (l *List) PlanDir(digest string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir, p := range l.plans {
		if p.digest == digest {
			return dir
		}
	}
	return ""
}

// Watch is a Source. It fails only if the list is invalid at the start. Later, it logs an invalid list and keeps the
// last valid one.
func (l *List) Watch(ctx context.Context, set func([]Backend), synced func()) error {
	return l.watch(ctx, listPeriod, set, synced)
}

func (l *List) watch(ctx context.Context, period time.Duration, set func([]Backend), synced func()) error {
	log := logr.FromContextOrDiscard(ctx)
	entries, stamp, err := l.entries()
	if err != nil {
		return err
	}
	backends, plans, err := l.read(ctx, entries)
	if err != nil {
		return err
	}
	l.use(plans)
	set(backends)
	synced()
	log.Info("Read the list of backends", "backends", len(backends))
	failed := ""
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		var next []Backend
		var plans map[string]listedPlan
		entries, changed, err := l.entries()
		if err == nil {
			if changed == stamp {
				failed = ""
				continue // no name is resolved again
			}
			next, plans, err = l.read(ctx, entries)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if reason := printable.Steady(err.Error()); reason != failed {
				failed = reason
				log.Info("Failed to read the list of backends; keeping the backends in use", "reason", failed)
			}
			continue
		}
		failed, stamp = "", changed
		l.use(plans)
		if !slices.EqualFunc(next, backends, Backend.Equal) {
			backends = next
			set(backends)
			log.Info("Backends changed", "backends", len(backends))
		}
	}
}

func (l *List) use(plans map[string]listedPlan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.plans = plans
}

// entries reads all files. The stamp changes with their content and with the plans that they name.
func (l *List) entries() (entries []entry, stamp string, err error) {
	entries = slices.Clone(l.urls)
	hash := sha256.New()
	for _, file := range l.files {
		text, err := regularfile.Read(file, maxListFile)
		if err != nil {
			return nil, "", fmt.Errorf("failed to read the backends: %w", err)
		}
		listed, err := parseEntries(file, text)
		if err != nil {
			return nil, "", err
		}
		entries = append(entries, listed...)
		hash.Write(text)
	}
	if len(entries) > maxListed {
		return nil, "", fmt.Errorf("%d backends are too many: at most %d are allowed", len(entries), maxListed)
	}
	seen := map[string]bool{}
	for _, e := range entries {
		if dir := e.planDir(); dir != "" && !seen[dir] {
			seen[dir] = true
			digest, err := plan.DigestOf(dir)
			fmt.Fprintln(hash, digest, err)
		}
	}
	return entries, string(hash.Sum(nil)), nil
}

// read returns the backends of valid entries, and their plans.
func (l *List) read(ctx context.Context, entries []entry) ([]Backend, map[string]listedPlan, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	var backends []Backend
	plans, servers, names := map[string]listedPlan{}, map[string]string{}, map[string]string{}
	for _, e := range entries {
		b, err := l.backend(e, plans)
		if err != nil {
			return nil, nil, err
		}
		if other, taken := names[b.Pod]; taken {
			return nil, nil, fmt.Errorf("%s.name: %q is invalid: %s has the same name", e.at, b.Pod, other)
		}
		names[b.Pod] = e.at
		resolved, err := l.resolved(ctx, b.Address)
		if err != nil {
			return nil, nil, fmt.Errorf("%s.address: %q is invalid: %w", e.at, e.Address, err)
		}
		for _, server := range resolved {
			if other, taken := servers[server]; taken {
				return nil, nil, fmt.Errorf("%s.address: %q is invalid: %s has the same address, %s", e.at, e.Address, other, server)
			}
			servers[server] = e.at
		}
		backends = append(backends, b)
	}
	slices.SortFunc(backends, func(a, b Backend) int { return cmp.Compare(a.Pod, b.Pod) })
	return backends, plans, nil
}

// resolved returns the sockets of host:port.
func (l *List) resolved(ctx context.Context, address string) ([]string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	found, err := l.resolve(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("failed to resolve the host: %w", err)
	}
	for i, text := range found {
		if ip, err := netip.ParseAddr(text); err == nil {
			found[i] = ip.Unmap().String()
		}
	}
	slices.Sort(found)
	var sockets []string
	for _, ip := range slices.Compact(found) {
		sockets = append(sockets, net.JoinHostPort(ip, port))
	}
	return sockets, nil
}

// backend validates an entry. It adds the plan of the entry to plans.
func (l *List) backend(e entry, plans map[string]listedPlan) (Backend, error) {
	invalid := func(field string, value any, allowed string) (Backend, error) {
		return Backend{}, fmt.Errorf("%s.%s: %v is invalid: %s", e.at, field, value, allowed)
	}
	address, secure, err := e.parseAddress()
	if err != nil {
		return Backend{}, err
	}
	b := Backend{Pod: cmp.Or(e.Name, address), Address: address, TLS: secure, Ranks: e.Ranks, Engine: cmp.Or(e.Engine, l.engine), Permuted: e.Realization == reshuffled}
	if !printableName.MatchString(b.Pod) {
		return invalid("name", strconv.Quote(b.Pod), "letters, digits and .:_-[] are allowed, at most 253")
	}
	if e.Realization != "" && e.Realization != reshuffled && e.Realization != engineMap {
		return invalid("realization", strconv.Quote(e.Realization), engineMap+" or "+reshuffled+" is allowed")
	}
	adapter, err := registry.For(b.Engine)
	if err != nil {
		return invalid("engine", strconv.Quote(b.Engine), registry.Types()+" are allowed")
	}
	if e.Ranks < 0 || e.Ranks > MaxRanks {
		return invalid("ranks", e.Ranks, fmt.Sprintf("0 to %d is allowed", MaxRanks))
	}
	if e.PlanDir == "" {
		return b, nil
	}
	if !adapter.CanPinRank() {
		return invalid("planDir", strconv.Quote(e.PlanDir), "engine "+b.Engine+" accepts no rank, so a plan has no effect on routing")
	}
	p, err := l.plan(e.planDir(), plans)
	if err != nil {
		return invalid("planDir", strconv.Quote(e.PlanDir), err.Error())
	}
	if b.Ranks == 0 && e.dir == "" { // a URL
		b.Ranks = p.ranks
	}
	if b.Ranks != p.ranks {
		return invalid("planDir", strconv.Quote(e.PlanDir), fmt.Sprintf("the plan is for %d ranks, and ranks is %d", p.ranks, b.Ranks))
	}
	b.PlanDigest, b.ModelDigest, b.Shape = p.digest, p.model, p.shape
	return b, nil
}

// plan returns the plan in a directory, and adds it to plans. It reads the files of a plan only if the manifest has
// changed: the manifest contains the digests of all files.
func (l *List) plan(dir string, plans map[string]listedPlan) (listedPlan, error) {
	if p, known := plans[dir]; known {
		return p, nil
	}
	digest, err := plan.DigestOf(dir)
	if err != nil {
		return listedPlan{}, err
	}
	l.mu.Lock()
	p, known := l.plans[dir]
	l.mu.Unlock()
	if !known || p.digest != digest {
		read, files, err := plan.Read(dir)
		if err != nil {
			return listedPlan{}, err
		}
		shape := &lar.Shape{Layers: read.HiddenLayers, Experts: read.Placement.Experts, ExpertsPerToken: read.Shape.TopK, Hidden: read.Shape.HiddenSize, Vocabulary: read.Vocabulary}
		for _, layer := range read.Placement.Layers {
			shape.MoELayers = append(shape.MoELayers, layer.Layer)
		}
		if shape.Validate() != nil {
			shape = nil // plans of earlier versions do not contain the experts of a token
		}
		p = listedPlan{digest: files.Digest, model: read.ModelDigest, ranks: read.Placement.Ranks, shape: shape}
	}
	plans[dir] = p
	return p, nil
}

// planDir returns the path of the plan directory; empty if there is none.
func (e *entry) planDir() string {
	if e.PlanDir == "" || filepath.IsAbs(e.PlanDir) {
		return e.PlanDir
	}
	return filepath.Join(e.dir, e.PlanDir)
}

// parseAddress returns host:port of the engine, and whether it serves TLS.
func (e *entry) parseAddress() (address string, secure bool, err error) {
	const allowed = "host:port, http://host:port or https://host:port is allowed"
	invalid := func() (string, bool, error) {
		return "", false, fmt.Errorf("%s.address: %.300q is invalid: %s", e.at, e.Address, allowed)
	}
	address = e.Address
	if strings.Contains(address, "://") {
		target, err := url.Parse(address)
		if err != nil || target.Host == "" || target.User != nil || target.Path != "" && target.Path != "/" || target.RawQuery != "" || target.Fragment != "" {
			return invalid()
		}
		ports := map[string]string{"http": "80", "https": "443"}
		standard, known := ports[target.Scheme]
		if !known {
			return invalid()
		}
		secure = target.Scheme == "https"
		address = net.JoinHostPort(target.Hostname(), cmp.Or(target.Port(), standard))
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return invalid()
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return invalid()
	}
	if strings.Contains(host, "%") {
		return "", false, fmt.Errorf("%s.address: %.300q is invalid: an IPv6 zone is not allowed, because it has a meaning on one host only", e.at, e.Address)
	}
	address = net.JoinHostPort(host, strconv.FormatUint(number, 10))
	if !printableName.MatchString(address) {
		return invalid()
	}
	return address, secure, nil
}
