// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"math/rand/v2"
	"slices"
)

// Independent streams of random numbers.
const (
	splitStream  = 0x73706c6974
	sampleStream = 0x73616d706c
)

// Split divides the requests into train and test requests, both ascending. Within each domain, it assigns whole
// documents in seeded order to train until trainPercent of the domain's requests are train. Without domains, all
// requests form one domain. No document is in both sets, and the last document of a domain always stays in test. If no
// domain has two documents, the documents of all domains are split together.
func Split(t *Trace, trainPercent int, seed uint64) (train, test []int, err error) {
	if trainPercent < 1 || trainPercent > 99 {
		return nil, nil, invalidf("train percent is %d; allowed is 1 to 99", trainPercent)
	}
	documents := t.documents()
	if len(documents) < 2 {
		return nil, nil, invalidf("request_document: the trace has one document; a split by document needs at least two")
	}
	train = takeTrain(documents, trainPercent, seed)
	if len(train) == 0 {
		for i := range documents {
			documents[i].domain = 0
		}
		train = takeTrain(documents, trainPercent, seed)
	}
	inTrain := make([]bool, t.Requests())
	for _, r := range train {
		inTrain[r] = true
	}
	for r, taken := range inTrain {
		if !taken {
			test = append(test, r)
		}
	}
	slices.Sort(train)
	return train, test, nil
}

type document struct {
	domain   int
	requests []int
}

// documents groups the requests by document, in the order of first appearance. A document belongs to the domain of its
// first request.
func (t *Trace) documents() []document {
	index := map[int32]int{}
	var documents []document
	for r, id := range t.Documents {
		i, known := index[id]
		if !known {
			i = len(documents)
			index[id] = i
			domain := 0
			if t.Domains != nil {
				domain = int(t.Domains[r])
			}
			documents = append(documents, document{domain: domain})
		}
		documents[i].requests = append(documents[i].requests, r)
	}
	return documents
}

func takeTrain(documents []document, percent int, seed uint64) []int {
	byDomain := map[int][]document{}
	for _, d := range documents {
		byDomain[d.domain] = append(byDomain[d.domain], d)
	}
	var train []int
	for domain, list := range byDomain {
		total := 0
		for _, d := range list {
			total += len(d.requests)
		}
		// One stream per domain: the order of one domain does not depend on the content of the others.
		order := rand.New(rand.NewPCG(seed, splitStream+uint64(domain))).Perm(len(list))
		taken := 0
		for _, i := range order[:len(order)-1] {
			if taken*100 >= percent*total {
				break
			}
			train = append(train, list[i].requests...)
			taken += len(list[i].requests)
		}
	}
	return train
}

// Shuffled returns the requests in seeded order.
func Shuffled(requests []int, seed uint64) []int {
	order := slices.Clone(requests)
	rand.New(rand.NewPCG(seed, sampleStream)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// Sample selects whole requests in seeded order until they have at least the given number of tokens. The result is
// ascending.
func Sample(t *Trace, requests []int, tokens int, seed uint64) []int {
	var picked []int
	for _, r := range Shuffled(requests, seed) {
		if tokens <= 0 {
			break
		}
		picked = append(picked, r)
		tokens -= t.Length(r)
	}
	slices.Sort(picked)
	return picked
}
